"""Blocks that are written again and again: what stays of them, who waits for whom, and processes that are killed."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from flexmarl.cluster.spill import Spill
from flexmarl.errors import ObjectError
from flexmarl.objects.backends import blocks
from flexmarl.objects.backends.blocks import Block
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import ObjectKey, checksum


@pytest.fixture
def store():
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="flexmarl-test-"))
    made = ShmObjectStore(folder / "objects")
    made.create()
    yield made
    shutil.rmtree(folder)


def key(version, policy="solver"):
    return ObjectKey(f"weights/{policy}/{version}")


def inodes(store):
    (root,) = store.__reduce__()[1]
    return {path.stat().st_ino for path in root.glob("*.block")}


def tree_of(value, items=1000):
    return {"a": torch.full((items,), float(value)), "b": torch.full((3, 5), value)}


def run(scenario):
    asyncio.run(scenario())


def test_versions_that_follow_one_another_share_two_blocks(store):
    async def scenario():
        seen = set()
        for version in range(9, 14):  # The key of version 10 is longer than that of 9.
            meta = await store.set(key(version), tree_of(version))
            mine = tree_of(0)
            assert await store.get_into(key(version), mine) == meta.checksum == checksum(tree_of(version))
            assert mine["b"].eq(version).all()
            await store.release(key(version - 1))
            seen |= inodes(store)
        assert len(seen) == 2

    run(scenario)


def test_a_block_whose_tensors_are_in_use_is_not_written_to(store):
    async def scenario():
        await store.set(key(1), tree_of(1))
        held = await store.get(key(1))
        await store.release(key(1))
        for version in range(2, 6):
            await store.set(key(version), tree_of(version))
            await store.release(key(version))
        assert held["a"].eq(1).all()
        assert len(inodes(store)) == 2, "one is held, the others shared one"
        del held
        before = inodes(store)
        await store.set(key(7), tree_of(7))
        await store.set(key(8), tree_of(8))
        assert inodes(store) == before, "what was held is free again"

    run(scenario)


def test_blocks_that_fit_no_more_and_more_than_two_are_removed_by_the_next_set(store):
    async def scenario():
        for version in range(5):
            await store.set(key(version), tree_of(version))
        await store.set(key(0, "writer"), tree_of(0))
        for version in range(5):
            await store.release(key(version))
        assert len(inodes(store)) == 6
        await store.set(key(5), tree_of(5))
        assert len(inodes(store)) == 3, "two of the solver, one of the writer"
        await store.release(key(5))
        await store.set(key(6), tree_of(6, items=7))
        assert len(inodes(store)) == 2, "the new one of the solver, the old one of the writer"

    run(scenario)


def test_an_object_that_fails_half_way_leaves_a_block_that_the_next_one_takes(store):
    class Broken(dict):
        def __getitem__(self, name):
            if name == "b":
                raise RuntimeError("the device is lost")
            return super().__getitem__(name)

    async def scenario():
        with pytest.raises(RuntimeError, match="the device is lost"):
            await store.set(key(1), Broken(tree_of(9)))
        (left,) = inodes(store)
        with pytest.raises(KeyError, match="there are: none"):
            await store.get_into(key(1), tree_of(0))
        meta = await store.set(key(1), tree_of(1))
        assert inodes(store) == {left}
        assert meta.checksum == checksum(await store.get(key(1))) == checksum(tree_of(1))

    run(scenario)


def test_what_is_taken_stays_in_its_block_which_is_the_next_object_without_a_copy(store):
    async def scenario():
        await store.set(key(1), tree_of(1))
        (block,) = inodes(store)
        for version in range(1, 12):  # The key of version 10 is longer than that of 9.
            mine = dict(await store.take(key(version)))
            assert mine["a"].eq(version).all()
            mine["a"] += 1
            mine["b"] += 1
            meta = await store.set(key(version + 1), mine)
            del mine
            read = await store.get(key(version + 1))
            assert meta.checksum == checksum(read) == checksum(tree_of(version + 1))
            assert inodes(store) == {block}
            left = weakref.ref(read["a"])
            del read
            async with asyncio.timeout(10):
                while left() is not None:  # noqa: ASYNC110 - a thread has what it worked on for a moment longer
                    await asyncio.sleep(0.001)

    run(scenario)


def test_a_taken_block_is_nobody_elses_until_the_last_of_its_tensors_is_gone(store):
    async def scenario():
        other = ShmObjectStore(*store.__reduce__()[1])
        await store.set(key(1), tree_of(1))
        (block,) = inodes(store)
        mine = dict(await store.take(key(1)))
        for version in (2, 3):
            await other.set(key(version), tree_of(version))
            await other.release(key(version))
        assert mine["a"].eq(1).all()
        assert block in inodes(store)
        assert len(inodes(store)) == 2
        last = mine["b"][1]
        del mine
        await store.set(key(4), tree_of(4))
        assert last.eq(1).all()
        del last
        await store.set(key(5), tree_of(5))
        assert len(inodes(store)) == 2
        assert (await store.get(key(4)))["a"].eq(4).all()

    run(scenario)


def test_what_was_given_back_is_locked_as_long_as_somebody_works_on_it(store, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_LOOKS", 20)
    other = ShmObjectStore(*store.__reduce__()[1])

    async def scenario():
        await store.set(key(1), tree_of(1))
        mine = dict(await store.take(key(1)))
        await store.set(key(2), mine)
        with pytest.raises(ObjectError, match=r"weights%2Fsolver%2F2.object' cannot be read: .* for 0\.04 s"):
            await other.get_into(key(2), tree_of(0))
        again = dict(await store.take(key(2)))
        again["a"].fill_(2.0)
        assert mine["a"].eq(2).all(), "witness: the same memory"
        await store.set(key(3), again)
        await store.release(key(3))
        for version in (4, 5):
            await other.set(key(version), tree_of(version))
            await other.release(key(version))
        assert mine["a"].eq(2).all(), "an object that was released at once is still the block of these tensors"
        await store.set(key(6), mine)
        await store.set(key(7), mine)
        del mine, again
        for version in (6, 7):
            assert (await other.get(key(version)))["a"].eq(2).all()
        assert len(inodes(store)) == 2, "the second of one tree is a copy, in the other's block"

    run(scenario)


def test_a_reader_that_came_too_late_finds_the_next_object_or_none(store, monkeypatch):
    """It has opened the file when the object is taken."""
    read = Block.lock_to_read

    def late(block, path):
        monkeypatch.setattr(Block, "lock_to_read", read)
        held.append(store._blocks.take(path, key(1)))
        return read(block, path)

    held = []
    asyncio.run(store.set(key(1), tree_of(1)))
    monkeypatch.setattr(Block, "lock_to_read", late)
    with pytest.raises(KeyError, match="no object 'weights/solver/1'"):
        asyncio.run(ShmObjectStore(*store.__reduce__()[1]).get(key(1)))
    assert held[0]["a"].eq(1).all()


def test_what_others_read_and_what_is_on_no_block_is_taken_as_a_copy(store):
    async def scenario():
        await store.set(key(1), tree_of(1))
        reading = await ShmObjectStore(*store.__reduce__()[1]).get(key(1))
        mine = dict(await store.take(key(1)))
        mine["a"].zero_()
        assert reading["a"].eq(1).all()
        del reading, mine
        await store.set(key(2), tree_of(2))
        (root,) = store.__reduce__()[1]
        file = root / store.file_name(key(2))
        copy = file.read_bytes()
        file.unlink()
        file.write_bytes(copy)
        mine = dict(await store.take(key(2)))
        assert checksum(mine) == checksum(tree_of(2))
        assert not file.exists()

    run(scenario)


def test_an_object_that_is_replaced_while_it_is_taken_is_the_new_one(store, monkeypatch):
    lock = Block.lock_to_write

    def later(block):
        monkeypatch.setattr(Block, "lock_to_write", lock)
        file.unlink()
        file.write_bytes(moved)
        return lock(block)

    async def scenario():
        await store.set(key(1), tree_of(2))
        nonlocal moved
        moved = file.read_bytes()
        await store.release(key(1))
        await store.set(key(1), tree_of(1))
        monkeypatch.setattr(Block, "lock_to_write", later)
        assert checksum(await store.take(key(1))) == checksum(tree_of(2))
        assert not file.exists()

    (root,) = store.__reduce__()[1]
    file, moved = root / store.file_name(key(1)), b""
    run(scenario)


def test_only_the_tensors_themselves_are_an_object_without_a_copy(store):
    async def scenario():
        await store.set(key(1), {"a": torch.ones(4, 4), "b": torch.zeros(4, 4)})
        mine = dict(await store.take(key(1)))
        trees = ({"a": mine["b"], "b": mine["a"]}, {"a": mine["a"].T, "b": mine["b"]}, {"a": mine["a"]})
        mine["a"][0] = 7.0
        for version, tree in enumerate(trees, start=2):
            meta = await store.set(key(version), tree)
            mine["a"].add_(1)
            mine["b"].add_(1)
            assert meta.checksum == checksum(await store.get(key(version))) != checksum(tree)

    run(scenario)


def test_the_block_of_a_process_that_is_killed_with_it_is_free(store):
    (root,) = store.__reduce__()[1]
    script = f"""
        import asyncio, sys
        from pathlib import Path
        from flexmarl.objects.backends.memory import ShmObjectStore
        from flexmarl.objects.interface import ObjectKey
        mine = asyncio.run(ShmObjectStore(Path({str(root)!r})).take(ObjectKey({key(1)!r})))
        mine["a"].zero_()
        print("taken", flush=True)
        sys.stdin.read()
    """
    asyncio.run(store.set(key(1), tree_of(1)))
    words = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"taken\n"
        with pytest.raises(KeyError):
            asyncio.run(store.get(key(1)))
        asyncio.run(store.set(key(2), tree_of(2)))
        assert len(inodes(store)) == 2, "witness: it has the block"
        process.kill()
    asyncio.run(store.set(key(3), tree_of(3)))
    assert len(inodes(store)) == 2
    assert asyncio.run(store.get(key(3)))["a"].eq(3).all()


def test_a_file_that_came_from_another_node_is_read_like_a_block(store):
    async def scenario():
        await store.set(key(1), tree_of(1))
        (root,) = store.__reduce__()[1]
        file = root / store.file_name(key(1))
        fetched = root / "fetched.partial"
        shutil.copyfile(file, fetched)
        file.unlink()
        fetched.rename(file)
        mine = tree_of(0)
        assert await store.get_into(key(1), mine) == checksum(tree_of(1)) == checksum(await store.get(key(1)))
        file.rename(root / store.file_name(key(2)))
        with pytest.raises(KeyError, match="no object 'weights/solver/2'"):
            await store.get(key(2))

    run(scenario)


@pytest.mark.parametrize("memory_bytes", [None, 500_000, 0])
def test_many_threads_read_and_write_at_a_time(store, memory_bytes, tmp_path):
    """Each object has 0.2 MB: with room for two, six of them go to disk in turn."""
    if memory_bytes is not None:
        Spill.allow(*store.__reduce__()[1], tmp_path / "spilled", memory_bytes)

    async def follow(policy):
        for version in range(20):
            await store.set(key(version, policy), tree_of(version, items=50_000))
            mine = [tree_of(0, items=50_000) for _ in range(3)]
            digests = await asyncio.gather(*(store.get_into(key(version, policy), tree) for tree in mine))
            assert set(digests) == {checksum(tree_of(version, items=50_000))}
            await store.release(key(version - 1, policy))

    async def scenario():
        await asyncio.gather(*(follow(policy) for policy in ("a", "b", "c")))
        assert len(inodes(store)) == 6 if memory_bytes is None else len(inodes(store)) < 6

    run(scenario)
