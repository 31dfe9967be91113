"""Files that a stop of the machine, a disk or a person left behind: recovered, or refused with what to do."""

import asyncio
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from flexmarl.errors import StoreError
from flexmarl.experience import store_file
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.store_file import read_store
from flexmarl.testing.experience import SOLVER
from tests.unit.experience.acknowledging import a_row, tokens
from tests.unit.experience.files import assert_holds, copy_as_it_is, filled, new_store, wal_of


def test_a_transaction_that_was_cut_off_is_as_if_it_had_not_been(tmp_path: Path):
    path, live = tmp_path / "experience.sqlite", tmp_path / "live" / "experience.sqlite"

    async def life() -> int:
        store = new_store(path)
        await store.put(SOLVER, [a_row(group) for group in range(20)])
        intact = wal_of(path).stat().st_size
        await store.put(SOLVER, [a_row(20)])
        copy_as_it_is(path, live)
        await store.close()
        return intact

    intact = asyncio.run(life())
    for size in random.Random(7).sample(range(intact, wal_of(live).stat().st_size), 5):
        torn = tmp_path / str(size) / "experience.sqlite"
        copy_as_it_is(live, torn)
        os.truncate(wal_of(torn), size)
        assert_holds(torn, set(range(20)), exactly=True)


def test_a_page_that_was_torn_while_it_was_merged_in_comes_from_the_wal_again(tmp_path: Path):
    path, torn = tmp_path / "experience.sqlite", tmp_path / "torn" / "experience.sqlite"

    async def life() -> None:
        store = new_store(path)
        await store.put(SOLVER, [a_row(group) for group in range(20)])
        merging = sqlite3.connect(path)
        merging.execute("PRAGMA wal_checkpoint(PASSIVE)")
        copy_as_it_is(path, torn)
        merging.close()
        await store.close()

    asyncio.run(life())
    size = torn.stat().st_size
    assert size > 20 * tokens(0).nbytes, "the rows have been merged in"
    os.truncate(torn, size - store_file.PAGE_BYTES // 2)
    with torn.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(os.urandom(1000))
    assert_holds(torn, set(range(20)), exactly=True)


@pytest.mark.parametrize("where", ["head", "middle", "end"])
def test_a_damaged_file_says_how_to_go_on(tmp_path: Path, where: str):
    path = tmp_path / "experience.sqlite"
    asyncio.run(filled(path, 50))
    size = path.stat().st_size
    with path.open("r+b") as file:
        if where == "end":
            file.truncate(size - 3 * store_file.PAGE_BYTES)
        else:
            file.seek(0 if where == "head" else size // 2 // store_file.PAGE_BYTES * store_file.PAGE_BYTES)
            file.write(random.Random(3).randbytes(store_file.PAGE_BYTES))
    words = "no SQLite file" if where == "head" else "the file is damaged.*\\.recover.*--resume"
    with pytest.raises(StoreError, match=f"{path}: .*{words}"):
        DurableStore.open(path)


def test_a_file_that_is_no_store_is_named(tmp_path: Path):
    text, other, empty = (tmp_path / name for name in ("notes.txt", "other.sqlite", "empty.sqlite"))
    text.write_text("no database" * 999)
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    empty.touch()
    for path, words in ((text, "no SQLite file"), (other, "no experience store"), (empty, "no experience store")):
        for opens in (DurableStore.open, DurableStore.join, lambda path: read_store(path).__enter__()):
            with pytest.raises(StoreError, match=f"{path}.*{words}"):
                opens(path)
    with pytest.raises(StoreError, match=r"no experience store at .*nowhere.*`store.type: sqlite` makes one"):
        DurableStore.open(tmp_path / "nowhere")


def test_a_store_that_was_killed_while_it_was_made_is_made_anew(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}.new{ending}").write_bytes(b"half of a store")
    asyncio.run(filled(path, 3))
    assert_holds(path, {0, 1, 2}, exactly=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.owner"]


@pytest.mark.parametrize("found", [store_file.LAYOUT_VERSION - 1, 99])
def test_a_store_of_another_layout_is_named(tmp_path: Path, found: int):
    path = tmp_path / "experience.sqlite"
    asyncio.run(new_store(path).close())
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {found}")
    db.close()
    said = f"layout {found} of the experience store, this flexmarl reads {store_file.LAYOUT_VERSION}"
    for use in (DurableStore.open, lambda path: read_store(path).__enter__()):
        with pytest.raises(StoreError, match=said):
            use(path)


def test_a_new_store_never_takes_the_place_of_an_old_one(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    asyncio.run(filled(path, 3))
    with pytest.raises(StoreError, match=r"exists; go on with it \(`--resume`\), or choose another run folder"):
        new_store(path)
    assert_holds(path, {0, 1, 2})
    shutil.copy(path, f"{path}-wal")
    path.unlink()
    with pytest.raises(StoreError, match=r"experience.sqlite-wal exist without .*: put that file back"):
        new_store(path)


def test_a_network_file_system_is_named_in_errors_of_locks():
    hint = store_file.network_hint(Path("/shared/run"), {"/": "ext4", "/shared": "nfs4", "/share": "ext4"})
    assert hint == "; /shared is a network file system (nfs4): put the run folder on a local disk"
    assert store_file.network_hint(Path("/home/run"), {"/": "ext4", "/shared": "nfs4"}) == ""
