"""Weights in shared memory whose writers and readers are killed at any moment."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from flexmarl.cluster.spill import Spill
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import ObjectKey


@pytest.fixture
def root():
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="flexmarl-test-"))
    ShmObjectStore(folder / "objects").create()
    yield folder / "objects"
    shutil.rmtree(folder)


PROGRAM = """
import asyncio, mmap, os, random, signal, sys, time, traceback
from pathlib import Path
import numpy as np
import torch
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import checksum

torch.set_num_threads(1)
root, seed = Path(sys.argv[1]), int(sys.argv[2])
counts = np.frombuffer(mmap.mmap(-1, 4096), np.int64)  # Shared with the children.
NEWEST, READ, MISSED, WRITING = 0, 8, 9, 16

def tree_of(value):
    return {"a": torch.full((200_000,), value), "b": torch.full((7,), value)}

def key(number):
    return f"weights/solver/{number}"

async def write(rng, slot):
    store = ShmObjectStore(root)
    while True:
        number = int(counts[slot]) + 2  # Numbers of a writer are all even, or all odd.
        counts[slot] = number
        counts[WRITING + slot] = 1
        await store.set(key(number), tree_of(number))
        counts[WRITING + slot] = 0
        await store.release(key(number - 4))

async def read(rng, slot):
    store, mine = ShmObjectStore(root), tree_of(0)
    while True:
        number = int(counts[rng.randrange(2)]) - 2 * rng.randrange(3)
        try:
            if rng.random() < 0.7:
                held, tree = await store.get_into(key(number), mine), mine
                assert held == checksum(tree_of(number)), f"torn: {number}"
            else:
                tree = await store.get(key(number))
                time.sleep(rng.random() * 0.01)
            assert all(bool((tensor == number).all()) for tensor in tree.values()), f"stale or torn: {number}"
            counts[READ] += 1
        except KeyError:
            counts[MISSED] += 1

def start(slot, seed):
    child = os.fork()
    if child == 0:
        try:
            asyncio.run((write if slot < 2 else read)(random.Random(seed), slot))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child

counts[0], counts[1] = 0, 1
rng, killed = random.Random(seed), 0
children = {slot: start(slot, seed * 1000 + slot) for slot in range(4)}
try:
    for life in range(40):
        time.sleep(rng.random() * 0.1)
        slot = rng.randrange(4)
        os.kill(children[slot], signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(children[slot], os.WUNTRACED)[1]), "a process that nobody killed has ended"
        killed += slot < 2 and counts[WRITING + slot]
        os.kill(children[slot], signal.SIGKILL)
        os.waitpid(children.pop(slot), 0)
        counts[WRITING + slot] = 0
        children[slot] = start(slot, seed * 1000 + life + 10)
    for child in children.values():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "a process that nobody killed has ended"
finally:
    for child in children.values():
        os.kill(child, signal.SIGKILL)
print(int(killed), int(counts[READ]), int(counts[MISSED]))
"""


@pytest.mark.parametrize(
    ("seed", "memory_bytes"), [(0, None), (1, None), (2, None), (3, 3_000_000), (4, 0)], ids=lambda value: str(value)
)
def test_killed_writers_and_readers_leave_nothing_torn_stale_or_behind(root, seed, memory_bytes, tmp_path):
    """Also where objects of 0.8 MB go to disk: some of them, or all."""
    store = ShmObjectStore(root)
    if memory_bytes is not None:
        Spill.allow(root, tmp_path / "spilled", memory_bytes)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(root), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    killed, read, missed = map(int, done.stdout.split())
    assert killed > 3, "the witness that writers were killed while they wrote"
    assert read > 20, "the witness that objects were read"
    assert missed > 0, "the witness that objects went while they were asked for"

    async def scenario():
        if memory_bytes is not None:
            assert any((tmp_path / "spilled").iterdir()), "the witness that objects went to disk"
        for path in root.glob("*.object"):
            await store.release(ObjectKey(unquote(path.stem)))
        for version in ("last", "and", "again"):
            key = ObjectKey(f"weights/solver/{version}")
            await store.set(key, {"a": torch.full((200_000,), 1), "b": torch.full((7,), 1)})
            await store.release(key)
        assert len({path.stat().st_ino for path in root.glob("*.block")}) <= 2
        left = {path.name for path in root.iterdir() if path.suffix != ".block"}
        assert left <= {"spill.json", "spill.json.link"}, "nothing else is left"

    asyncio.run(scenario())
