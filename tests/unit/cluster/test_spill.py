"""Files of a node that go to disk where they would take more memory than they may."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.spill import Spill


@pytest.fixture
def spill(tmp_path_factory: pytest.TempPathFactory) -> Spill:
    return allowed(tmp_path_factory.mktemp("node"), 1000)


def allowed(folder: Path, most_bytes: int) -> Spill:
    memory = folder / "memory"
    memory.mkdir()
    Spill.allow(memory, folder / "disk", most_bytes)
    made = Spill.of(memory)
    assert made is not None
    return made


def put(spill: Spill, name: str, data: bytes, *, used: int) -> None:
    """Writes a file as processes do: a block, and the file's name for it."""
    block = spill.memory / f"{name}-1.block"
    block.write_bytes(data)
    os.link(block, spill.memory / f"{name}.object")
    os.utime(block, ns=(used, used))


def read(spill: Spill, name: str) -> bytes:
    return (spill.memory / f"{name}.object").read_bytes()


def in_memory(spill: Spill) -> list[str]:
    return sorted(path.stem for path in spill.memory.glob("*.object") if not path.is_symlink())


def on_disk(spill: Spill) -> int:
    return len(list(spill.disk.iterdir()))


def test_a_folder_whose_files_stay_in_memory_has_no_spill(tmp_path: Path) -> None:
    assert Spill.of(tmp_path) is None


def test_those_that_went_unread_for_longest_go_and_keep_their_names_and_bytes(spill: Spill) -> None:
    for name, used in {"second": 2, "first": 1, "third": 3}.items():
        put(spill, name, name.encode() * 60, used=used)
    assert spill.make_room(100)
    assert in_memory(spill) == ["second", "third"], "no more went than had to"
    assert spill.make_room(600)
    assert in_memory(spill) == ["third"]
    assert [read(spill, name) for name in ("first", "second", "third")] == [
        name.encode() * 60 for name in ("first", "second", "third")
    ]


def test_what_is_larger_than_all_memory_moves_nothing(spill: Spill) -> None:
    put(spill, "a", b"x" * 500, used=1)
    assert not spill.make_room(1001)
    assert (in_memory(spill), on_disk(spill)) == (["a"], 0)


def test_free_blocks_are_given_back_but_for_the_one_that_will_be_written_to(spill: Spill) -> None:
    for name in ("mine-1", "mine-2", "other-1"):
        (spill.memory / f"{name}.block").write_bytes(b"x" * 400)
    assert spill.make_room(400, reusing="mine-")
    assert sorted(path.name for path in spill.memory.glob("*.block")) == ["mine-1.block"]


def test_a_block_that_somebody_reads_stays(spill: Spill) -> None:
    path = spill.memory / "a.block"
    path.write_bytes(b"x" * 900)
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        spill.remove_free()
        assert reader.read() == b"x" * 900
    spill.remove_free()
    assert not path.exists()


def test_a_file_that_is_removed_is_nowhere_wherever_it_was(spill: Spill) -> None:
    put(spill, "old", b"x" * 600, used=1)
    put(spill, "new", b"y" * 300, used=2)
    assert spill.make_room(500)
    assert (in_memory(spill), on_disk(spill)) == (["new"], 1)
    for name in ("old.object", "new.object", "unknown.object"):
        spill.remove(name)
    assert (list(spill.memory.glob("*.object")), on_disk(spill)) == ([], 0)


def test_a_reader_of_a_file_that_moves_reads_on(spill: Spill) -> None:
    put(spill, "a", b"x" * 600, used=1)
    with (spill.memory / "a.object").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert reader.read(100) == b"x" * 100
        assert spill.move_one()
        assert in_memory(spill) == []
        assert reader.read() == b"x" * 500
    assert read(spill, "a") == b"x" * 600


def test_a_file_that_is_removed_while_it_is_copied_does_not_come_back(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(spill, "a", b"x" * 600, used=1)
    copy = shutil.copyfileobj

    def removed_meanwhile(there: Any, here: Any, length: int) -> None:
        copy(there, here, length)
        spill.remove("a.object")

    monkeypatch.setattr("shutil.copyfileobj", removed_meanwhile)
    assert not spill.move_one()
    assert (list(spill.memory.glob("*.object")), on_disk(spill)) == ([], 0)


def test_what_a_process_that_died_has_left_on_disk_goes_with_the_next_file_that_moves(spill: Spill) -> None:
    (spill.disk / f"{2**22 + 1}-0.object").write_bytes(b"half of it")  # No process has a number as large as that.
    (spill.memory / "spill.json.link").symlink_to(spill.disk / "somewhere")
    put(spill, "a", b"x" * 600, used=1)
    assert spill.make_room(600)
    assert (read(spill, "a"), on_disk(spill)) == (b"x" * 600, 1)
    assert sorted(path.name for path in spill.memory.iterdir()) == ["a.object", "spill.json"]


def test_without_room_on_disk_a_file_stays_in_memory_and_nothing_of_the_copy_is_left(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    put(spill, "a", b"x" * 600, used=1)
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        spill.make_room(600)
    assert (in_memory(spill), on_disk(spill)) == (["a"], 0)


Act = tuple[str, int, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@settings(max_examples=200, deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["set", "read", "remove"]), st.integers(0, 5), st.integers(1, 1200)), max_size=25
    )
)
def test_whatever_is_set_read_and_removed_no_byte_is_lost_and_memory_is_never_exceeded(
    folders: Path, acts: list[Act]
) -> None:
    folder = folders / os.urandom(8).hex()
    folder.mkdir()
    spill, held = allowed(folder, 1000), dict[str, bytes]()
    for time, (what, number, size) in enumerate(acts):
        name = f"file-{number}"
        if what == "remove":
            spill.remove(f"{name}.object")
            (spill.memory / f"{name}-1.block").unlink(missing_ok=True)
            held.pop(name, None)
        elif what == "read" and name in held:
            os.utime(spill.memory / f"{name}.object", ns=(time, time))
        elif what == "set" and name not in held:
            held[name] = bytes([number]) * size
            if spill.make_room(size):
                put(spill, name, held[name], used=time)
            else:
                path = spill.new_path()
                path.write_bytes(held[name])
                spill.name(path, f"{name}.object")
        memory = {path.stat().st_ino: path.stat().st_size for path in spill.memory.glob("*.block")}
        assert sum(memory.values()) <= 1000
        assert {one: read(spill, one) for one in held} == held
        assert on_disk(spill) == sum(path.is_symlink() for path in spill.memory.iterdir())
