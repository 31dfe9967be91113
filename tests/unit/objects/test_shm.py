"""Objects in shared memory, seen from several processes."""

import asyncio
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from flexmarl.cluster.spill import Spill
from flexmarl.errors import ObjectError
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import ObjectKey, checksum
from flexmarl.testing.object_checks import check_object_store, heterogeneous_tree

KEY = ObjectKey("weights/solver/3")


@pytest.fixture
def root():
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="flexmarl-test-"))
    yield folder / "objects"
    shutil.rmtree(folder)


@pytest.fixture
def store(root):
    made = ShmObjectStore(root)
    made.create()
    return made


def elsewhere(root, code, ends=0):
    """Runs the body of an async function in a process of its own; what it prints."""
    program = f"""
import asyncio
import os
import signal
from pathlib import Path
import torch
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import checksum
from flexmarl.testing.object_checks import heterogeneous_tree
async def main(store):
{code}
asyncio.run(main(ShmObjectStore(Path({str(root)!r}))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == ends, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def objects(root):
    return sorted(path.name for path in root.iterdir() if path.suffix != ".block")


def blocks(root):
    return sorted(root.glob("*.block"))


def test_the_store_in_shared_memory_keeps_the_contract(root):
    def make():
        folder = ShmObjectStore(Path(tempfile.mkdtemp(dir=root.parent)) / "objects")
        folder.create()
        return folder

    asyncio.run(check_object_store(make))


def test_what_one_process_sets_another_gets_with_the_same_checksum_and_may_keep(root, store):
    (set_there,) = elsewhere(root, f"    print((await store.set({KEY!r}, heterogeneous_tree())).checksum)")

    async def scenario():
        tree = await store.get(KEY)
        released = elsewhere(root, f"    await store.release({KEY!r}); print('released')")
        return checksum(tree), released

    assert asyncio.run(scenario()) == (set_there, ["released"])
    assert set_there == checksum(heterogeneous_tree())
    assert objects(root) == []


class Lingering(ThreadPoolExecutor):
    """Threads that keep their work for as long as they like, as a busy machine makes them do for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.works = []

    def submit(self, fn, /, *args, **kwargs):
        self.works.append((fn, args, kwargs))
        return super().submit(fn, *args, **kwargs)


def test_what_was_set_is_held_by_no_thread(store):
    async def scenario():
        lingering = Lingering()
        asyncio.get_running_loop().set_default_executor(lingering)
        tree = {"w": torch.zeros(3)}
        held = weakref.ref(tree["w"])
        await store.set(KEY, tree)
        del tree
        assert lingering.works, "witness: a thread has worked"
        return held()

    assert asyncio.run(scenario()) is None, "who frees a device after this leaves nothing on it"


def test_what_a_reader_writes_nobody_else_sees(root, store):
    async def scenario():
        await store.set(KEY, {"w": torch.zeros(3)})
        mine, other = (await store.get(KEY))["w"], (await store.get(KEY))["w"]
        mine.fill_(9.0)
        return mine.tolist(), other.tolist()

    assert asyncio.run(scenario()) == ([9.0] * 3, [0.0] * 3)
    assert elsewhere(root, f"    print((await store.get({KEY!r}))['w'].sum().item())") == ["0.0"]


def test_a_writer_that_is_killed_half_way_leaves_no_object(root, store):
    killed = f"""
    class Tree(dict):
        def __getitem__(self, name):
            if name == "b":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(name)
    await store.set({KEY!r}, Tree(a=torch.ones(1000), b=torch.ones(1000)))"""
    elsewhere(root, killed, ends=-signal.SIGKILL)
    (left,) = root.iterdir()
    assert left.suffix == ".block", "the witness that it was killed in the middle"

    async def scenario():
        with pytest.raises(KeyError, match="there are: none"):
            await store.get(KEY)
        await store.set(KEY, {"w": torch.ones(2)})
        assert (await store.get(KEY))["w"].tolist() == [1.0, 1.0]

    asyncio.run(scenario())


def test_only_the_user_may_read(root, store):
    asyncio.run(store.set(KEY, {"w": torch.zeros(3)}))
    (block,) = blocks(root)
    assert (stat.S_IMODE(root.stat().st_mode), stat.S_IMODE(block.stat().st_mode)) == (0o700, 0o600)
    assert objects(root) == ["weights%2Fsolver%2F3.object"]


def test_an_object_that_does_not_fit_is_an_error_that_says_what_would_work(root, store):
    there_are = os.statvfs(root).f_blocks * os.statvfs(root).f_frsize
    too_big = torch.zeros(1).expand(there_are)
    asyncio.run(store.set(KEY, {"w": torch.zeros(3)}))
    with pytest.raises(ObjectError) as raised:
        asyncio.run(store.set(ObjectKey("weights/solver/4"), {"w": too_big}))
    for part in ("weights/solver/4", f"{4 * there_are:,}"[:5], str(root), "are free", "flexmarl clean", "--shm-size"):
        assert part in str(raised.value)
    assert (objects(root), len(blocks(root))) == (["weights%2Fsolver%2F3.object"], 1), "nothing of it stays"


@pytest.mark.parametrize("memory_bytes", [0, 3000])
def test_the_store_keeps_the_contract_where_objects_are_on_disk(root, tmp_path, memory_bytes):
    spilled = tmp_path / "spilled"

    def make():
        folder = ShmObjectStore(Path(tempfile.mkdtemp(dir=root.parent)) / "objects")
        folder.create()
        Spill.allow(*folder.__reduce__()[1], spilled, memory_bytes)
        return folder

    asyncio.run(check_object_store(make))
    assert list(spilled.iterdir()), "the witness: some are on disk"


def test_objects_that_went_unread_for_longest_are_on_disk_and_read_there_by_any_process(root, store, tmp_path):
    Spill.allow(root, tmp_path / "spilled", 40_000)
    keys = [ObjectKey(f"weights/policy-{number}/1") for number in range(4)]
    tree = {"w": torch.rand(2500)}  # 14 096 bytes with its header: two fit.
    for moment, key in enumerate(keys[:2]):
        asyncio.run(store.set(key, tree))
        os.utime(root / store.file_name(key), ns=(moment, moment))  # A kernel's clock of files has ticks of 4 ms.
    assert asyncio.run(store.get_into(keys[0], {"w": torch.zeros(2500)})) == checksum(tree)
    moved = []
    for key in keys[2:]:
        asyncio.run(store.set(key, tree))
        os.utime(root / store.file_name(key), ns=(2**62, 2**62))
        moved.append([key for key in keys if (root / store.file_name(key)).is_symlink()])
    assert moved == [[keys[1]], [keys[0], keys[1]]], "the one that was read stayed for longer"
    (tensor,) = elsewhere(root, f"    print(checksum(await store.get({str(keys[1])!r})))")
    assert tensor == checksum(tree)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "spilled").iterdir()} == {0o600}
    for key in keys:
        asyncio.run(store.release(key))
    assert list((tmp_path / "spilled").iterdir()) == []


def test_without_room_in_memory_and_on_disk_the_error_names_both(root, store, tmp_path, monkeypatch):
    def taken(descriptor, offset, length):
        pytest.fail(f"{length} bytes were reserved: for a moment nobody else could write")

    Spill.allow(root, tmp_path / "spilled", 10)
    monkeypatch.setattr(os, "posix_fallocate", taken)
    there_are = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ObjectError) as raised:
        asyncio.run(store.set(KEY, {"w": torch.zeros(1).expand(there_are)}))
    for part in ("weights/solver/3", str(root), str(tmp_path / "spilled"), "set TMPDIR", "flexmarl clean"):
        assert part in str(raised.value)
    assert list((tmp_path / "spilled").iterdir()) == []


def test_without_the_folder_of_the_run_nothing_is_set(root):
    with pytest.raises(ObjectError, match=r"there is no folder .*objects; its run has ended, or has not created it"):
        asyncio.run(ShmObjectStore(root).set(KEY, {"w": torch.zeros(3)}))


def test_a_store_travels_to_other_processes(root, store):
    asyncio.run(store.set(KEY, {"w": torch.ones(3)}))
    there = pickle.loads(pickle.dumps(store))
    assert asyncio.run(there.get(KEY))["w"].tolist() == [1.0] * 3
