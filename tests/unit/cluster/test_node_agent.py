"""Agents of three nodes in one process: files cross once, whole or not at all, whatever is lost or dropped."""

import asyncio
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.cluster import node_agent
from flexmarl.cluster.interface import ClusterNode
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.locations import Sent
from flexmarl.cluster.node_agent import LocalAgent, NodeAgent, Offer, stretches
from flexmarl.errors import ObjectError, WorkerError
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.backends.node import NodeObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectMeta, RunCopy, TensorTree, checksum, weights_key
from flexmarl.objects.settings import Verify
from flexmarl.records import PolicyName, Version
from flexmarl.testing.object_checks import check_object_store, heterogeneous_tree

HOME, LEFT, RIGHT = "home", "left", "right"


class Agents:
    """The agents of three nodes, which call one another directly. Reads of a node can be made to fail."""

    def __init__(
        self,
        leases: Mapping[str, RunLeases],
        *,
        deltas: bool = True,
        one_sided: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """Their folders are empty, whatever agents with these leases left there."""
        for one in leases.values():
            shutil.rmtree(one.shared_memory(), ignore_errors=True)
            shutil.rmtree(one.spilled(), ignore_errors=True)
        self._one_sided = one_sided
        self.reads: Counter[str] = Counter()
        self.before_read: Callable[[str], Coroutine[None, None, None]] | None = None
        """Awaited with the source before each piece; may raise."""
        self.offered: dict[int, BinaryIO] = {}
        """What is offered for one-sided reads, by number."""
        self.loop: asyncio.AbstractEventLoop
        self._agents = {
            name: LocalAgent(
                ClusterNode(name=name, id=name, address="", cpus=1, devices=0),
                home=HOME,
                leases=leases[name],
                peers=self,
                memory=LocalMemory(self, name) if one_sided else None,
                deltas=deltas,
                memory_bytes=memory_bytes,
            )
            for name in (HOME, LEFT, RIGHT)
        }

    def __getitem__(self, node: str) -> LocalAgent:
        return self._agents[node]

    def files(self, node: str) -> list[str]:
        """What is in the folder of a node."""
        return sorted(path.name for path in self._agents[node].path.iterdir())

    def agent(self, node: str) -> NodeAgent:
        return self._agents[node]

    async def read(self, node: str, file: str, start: int, num_bytes: int) -> memoryview:
        assert not self._one_sided, "the source's agent takes no part"
        self.reads[node] += 1
        if self.before_read:
            await self.before_read(node)
        data = (self._agents[node].path / file).read_bytes()[start : start + num_bytes]
        assert len(data) == num_bytes
        return memoryview(data)


class LocalMemory:
    """A OneSidedMemory of which each transfer is a piece."""

    def __init__(self, agents: Agents, node: str) -> None:
        self._agents, self._node = agents, node

    def offer(self, path: Path, number: int) -> Offer:
        file = path.open("rb")
        fcntl.flock(file, fcntl.LOCK_SH)
        self._agents.offered[number], self._agents.loop = file, asyncio.get_running_loop()
        return Offer(session=self._node, address=number, num_bytes=path.stat().st_size)

    def withdraw(self, number: int) -> None:
        if file := self._agents.offered.pop(number, None):
            file.close()

    def read(self, offer: Offer, descriptor: int, start: int, num_bytes: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), "it blocks"
        self._agents.reads[offer.session] += 1
        if self._agents.before_read:
            loop = self._agents.loop
            asyncio.run_coroutine_threadsafe(self._agents.before_read(offer.session), loop).result()
        if (file := self._agents.offered.get(offer.address)) is None:
            raise OSError("it was withdrawn")
        data = os.pread(file.fileno(), num_bytes, start)
        assert len(data) == num_bytes
        os.pwrite(descriptor, data, start)

    @property
    def chunk_bytes(self) -> int:
        return node_agent.PIECE_BYTES

    def close(self) -> None:
        assert not self._agents.offered


class Files:
    """The files of one node, for a store in this process."""

    def __init__(self, agent: LocalAgent) -> None:
        self._agent = agent
        self.fetch, self.drop, self.announce = agent.fetch, agent.drop, agent.announce

    @property
    def at_home(self) -> bool:
        return False

    async def folder(self) -> Path:
        return Path(await self._agent.folder())


@pytest.fixture(scope="module")
def leases() -> Iterator[dict[str, RunLeases]]:
    """The leases of three nodes. Each has a process of its own, so that the tests share them."""
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as folder:
        root = Path(folder) / "runs"
        made = {name: RunLeases(name, root=root) for name in (HOME, LEFT, RIGHT)}
        agents = Agents(made)
        yield made
        for name in made:
            asyncio.run(agents[name].close())
        assert list(root.iterdir()) == []
        assert not any(one.shared_memory().exists() for one in made.values())


@pytest.fixture(params=[False, True], ids=["piece-by-piece", "one-sided"])
def one_sided(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def agents(leases: dict[str, RunLeases], monkeypatch: pytest.MonkeyPatch, one_sided: bool) -> Iterator[Agents]:
    monkeypatch.setattr(node_agent, "PIECE_BYTES", 1000)
    agents = Agents(leases, one_sided=one_sided)
    yield agents
    assert not agents.offered, "all that was offered was withdrawn"


@given(chosen=st.sets(st.integers(0, 9)), longest=st.integers(1, 12), last=st.integers(1, node_agent.PIECE_BYTES))
def test_stretches_are_the_pieces_joined(chosen: set[int], longest: int, last: int) -> None:
    piece = node_agent.PIECE_BYTES
    starts, end = [index * piece for index in chosen], 9 * piece + last
    joined = list(stretches(starts, end, longest * piece))
    assert all(0 < size <= longest * piece for _, size in joined)
    covered = [start for begin, size in joined for start in range(begin, begin + size, piece)]
    assert covered == sorted(starts)
    assert sum(size for _, size in joined) == sum(min(piece, end - start) for start in starts)


async def put(agents: Agents, node: str, file: str, data: bytes) -> None:
    (agents[node].path / file).write_bytes(data)
    await agents[node].announce(file)


class SetHereGetThere:
    """A store that sets on one node and gets on another."""

    def __init__(self, agents: Agents) -> None:
        self._one, self._other = (NodeObjectStore(Files(agents[node])) for node in (LEFT, RIGHT))

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        return await self._one.set(key, tree)

    async def get(self, key: ObjectKey) -> TensorTree:
        return await self._other.get(key)

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        return await self._other.get_into(key, tree, verify=verify, run=run)

    async def take(self, key: ObjectKey) -> TensorTree:
        return await self._other.take(key)

    async def release(self, key: ObjectKey) -> None:
        await self._other.release(key)


def test_a_store_on_agents_keeps_the_laws_of_object_stores(leases: dict[str, RunLeases], one_sided: bool) -> None:
    asyncio.run(check_object_store(lambda: SetHereGetThere(Agents(leases, one_sided=one_sided))))


@pytest.mark.parametrize("memory_bytes", [0, 9000])
def test_it_keeps_them_where_files_spill_to_disk(
    leases: dict[str, RunLeases], one_sided: bool, memory_bytes: int
) -> None:
    asyncio.run(
        check_object_store(lambda: SetHereGetThere(Agents(leases, one_sided=one_sided, memory_bytes=memory_bytes)))
    )


def test_files_that_spilled_cross_to_other_nodes_and_go_from_all(
    leases: dict[str, RunLeases], one_sided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "PIECE_BYTES", 1000)
    agents = Agents(leases, one_sided=one_sided, memory_bytes=12_000)
    spilled = {node: leases[node].spilled() for node in (HOME, LEFT, RIGHT)}

    async def act() -> None:
        files = [f"weights%2F{policy}%2F1.object" for policy in ("solver", "writer", "judge")]
        for number, file in enumerate(files):
            await put(agents, LEFT, file, bytes([number]) * 5000)
            os.utime(agents[LEFT].path / file, ns=(number, number))
            await agents[RIGHT].fetch(file)
            os.utime(agents[RIGHT].path / file, ns=(number, number))
        assert [(agents[RIGHT].path / file).is_symlink() for file in files] == [True, False, False]
        await agents[HOME].lose(LEFT)  # What HOME fetches now comes from RIGHT, where one file is on disk.
        for number, file in enumerate(files):
            await agents[HOME].fetch(file)
            assert (agents[HOME].path / file).read_bytes() == bytes([number]) * 5000
        big = "weights%2Flarge%2F1.object"
        await put(agents, RIGHT, big, b"x" * 20_000)
        await agents[HOME].fetch(big)
        assert (agents[HOME].path / big).is_symlink(), "it is larger than all memory that files may take"
        assert (agents[HOME].path / big).read_bytes() == b"x" * 20_000
        for file in [*files, big]:
            await agents[HOME].drop(file)
        assert [path for node in (HOME, RIGHT) for path in spilled[node].iterdir()] == []
        assert not any(name.endswith(".object") for node in (HOME, RIGHT) for name in agents.files(node))

    asyncio.run(act())


def test_a_fetch_to_disk_that_fails_leaves_nothing(leases: dict[str, RunLeases], one_sided: bool) -> None:
    agents = Agents(leases, one_sided=one_sided, memory_bytes=0)

    async def act() -> None:
        await put(agents, LEFT, "file.object", b"x" * 5000)

        async def fail(node: str) -> None:
            raise OSError("cut off")

        agents.before_read = fail
        with pytest.raises(ObjectError, match="cut off"):
            await agents[RIGHT].fetch("file.object")
        assert list(leases[RIGHT].spilled().iterdir()) == []

    asyncio.run(act())


def test_where_memory_is_full_though_less_than_allowed_is_taken_a_file_is_fetched_to_disk(
    leases: dict[str, RunLeases], one_sided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(leases, one_sided=one_sided, memory_bytes=1 << 30)
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(agents[RIGHT].path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, length)

    async def act() -> None:
        await put(agents, LEFT, FIRST, b"x" * 5000)
        monkeypatch.setattr(os, "posix_fallocate", full)
        await agents[RIGHT].fetch(FIRST)
        assert (agents[RIGHT].path / FIRST).is_symlink()
        assert (agents[RIGHT].path / FIRST).read_bytes() == b"x" * 5000

    asyncio.run(act())


def test_a_key_is_set_once_on_all_nodes(agents: Agents) -> None:
    async def act() -> None:
        stores = {node: NodeObjectStore(Files(agents[node])) for node in (LEFT, RIGHT)}
        await stores[LEFT].set(ObjectKey("w"), {"a": torch.zeros(2)})
        with pytest.raises(ValueError, match="object 'w' is already set on another node"):
            await stores[RIGHT].set(ObjectKey("w"), {"a": torch.ones(2)})
        assert (await stores[RIGHT].get(ObjectKey("w")))["a"].tolist() == [0, 0], "the first one stays"

    asyncio.run(act())


def test_many_who_ask_at_once_share_one_fetch(agents: Agents) -> None:
    async def act() -> None:
        data = os.urandom(10_001)
        await put(agents, LEFT, "file", data)
        await asyncio.gather(*(agents[RIGHT].fetch("file") for _ in range(5)))
        assert (agents[RIGHT].path / "file").read_bytes() == data
        assert agents.reads == {LEFT: 11}
        _, fetches = await agents[HOME].fetches()
        assert [(one.file, one.node, one.sent) for one in fetches] == [("file", RIGHT, Sent(len(data)))]

    asyncio.run(act())


def test_a_source_that_is_lost_in_the_middle_is_replaced_by_another(agents: Agents) -> None:
    async def act() -> None:
        data = os.urandom(5000)
        await put(agents, LEFT, "file", data)
        await agents[HOME].fetch("file")
        agents.reads.clear()

        async def lose_home(node: str) -> None:
            if node == HOME and agents.reads[HOME] == 3:
                raise WorkerError("power cut")

        agents.before_read = lose_home
        await agents[RIGHT].fetch("file")
        assert (agents[RIGHT].path / "file").read_bytes() == data
        assert agents.reads[LEFT] == 5, "witness: the other source gave all of it"

    asyncio.run(act())


def test_an_object_whose_setter_died_before_anybody_knew_of_it_is_released_and_set_anew(agents: Agents) -> None:
    async def act() -> None:
        key = ObjectKey("weights/solver/1")
        await ShmObjectStore(agents[LEFT].path).set(key, {"a": torch.zeros(4)})
        store = NodeObjectStore(Files(agents[LEFT]))
        await store.release(key)
        await store.set(key, {"a": torch.ones(4)})
        assert torch.equal((await NodeObjectStore(Files(agents[RIGHT])).get(key))["a"], torch.ones(4))

    asyncio.run(act())


def test_without_another_source_it_says_what_failed_and_leaves_nothing(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)

        async def fail(node: str) -> None:
            raise WorkerError("power cut")

        agents.before_read = fail
        with pytest.raises(ObjectError, match=r"'file' cannot be fetched to node 'right': from node left: .*power cut"):
            await agents[RIGHT].fetch("file")
        assert agents.files(RIGHT) == []
        assert await agents[HOME].fetches() == (0, [])
        agents.before_read = None
        await agents[RIGHT].fetch("file")
        with pytest.raises(FileNotFoundError, match=r"no file 'other'; there are: \['file'\]"):
            await agents[RIGHT].fetch("other")

    asyncio.run(act())


def test_a_file_that_is_dropped_while_it_is_fetched_is_nowhere(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)

        async def drop(node: str) -> None:
            if agents.reads[LEFT] == 2:
                await agents[RIGHT].drop("file")

        agents.before_read = drop
        with pytest.raises(FileNotFoundError):
            await agents[RIGHT].fetch("file")
        assert [agents.files(node) for node in (HOME, LEFT, RIGHT)] == [[], [], []]
        agents.before_read = None
        await put(agents, RIGHT, "file", b"new")
        await agents[LEFT].fetch("file")
        assert (agents[LEFT].path / "file").read_bytes() == b"new", "the name can be used again"

    asyncio.run(act())


def test_a_drop_between_the_last_piece_and_the_name_is_noticed(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 10)
        end_fetch = agents[HOME].end_fetch

        async def ended(file: str, number: int, sent: Sent | None) -> bool:
            current = await end_fetch(file, number, sent)
            await agents[RIGHT].drop("file")
            return current

        agents[HOME].end_fetch = ended
        with pytest.raises(FileNotFoundError, match="was dropped while it was fetched"):
            await agents[RIGHT].fetch("file")
        assert [agents.files(node) for node in (LEFT, RIGHT)] == [[], []]

    asyncio.run(act())


def test_a_node_that_home_takes_for_lost_keeps_nothing_of_a_fetch(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)

        async def lose(node: str) -> None:
            await agents[HOME].lose(RIGHT)

        agents.before_read = lose
        with pytest.raises(FileNotFoundError, match="was dropped while it was fetched"):
            await agents[RIGHT].fetch("file")
        assert agents.files(RIGHT) == []

    asyncio.run(act())


def test_without_room_the_node_is_named_and_no_other_source_is_tried(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ObjectError, match=r"node 'right': fetching 'file' needs 5,000 bytes in .*/dev/shm"):
            await agents[RIGHT].fetch("file")
        assert agents.files(RIGHT) == []
        assert agents.reads == {}

    asyncio.run(act())


FIRST, SECOND, THIRD = (f"weights%2Fsolver%2F{version}.object" for version in (1, 2, 3))


async def fetched(agents: Agents, file: str, data: bytes) -> int:
    """The inode of a file of LEFT that RIGHT has fetched."""
    await put(agents, LEFT, file, data)
    await agents[RIGHT].fetch(file)
    path = agents[RIGHT].path / file
    assert path.read_bytes() == data
    return path.stat().st_ino


def test_memory_of_a_file_that_was_fetched_is_written_again_unless_somebody_reads_it(agents: Agents) -> None:
    async def act() -> None:
        first = await fetched(agents, FIRST, b"a" * 5000)
        other = await fetched(agents, "weights%2Fjudge%2F1.object", b"o" * 5000)
        assert await fetched(agents, SECOND, b"b" * 5000) not in (first, other)
        with (agents[RIGHT].path / FIRST).open("rb") as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            await agents[HOME].drop(FIRST)
            third = await fetched(agents, THIRD, b"c" * 5000)
            assert third != first
            assert reader.read() == b"a" * 5000
        await agents[HOME].drop(THIRD)
        assert await fetched(agents, FIRST, b"d" * 5000) in (first, third)
        assert len(agents.files(RIGHT)) == 6  # Two of solver, one of judge, and the blocks they are in.
        await agents[HOME].drop(FIRST)
        await fetched(agents, FIRST, b"e" * 6000)
        assert len(agents.files(RIGHT)) == 6  # The block of another size is gone.

    asyncio.run(act())


def test_free_memory_is_given_back_where_there_is_no_room(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if any(path.stat().st_nlink == 1 and path.stat().st_size for path in agents[RIGHT].path.glob("*.block")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, length)

    async def act() -> None:
        await fetched(agents, FIRST, b"a" * 5000)
        await agents[HOME].drop(FIRST)
        monkeypatch.setattr(os, "posix_fallocate", full)
        await fetched(agents, "weights%2Fjudge%2F1.object", b"o" * 5000)
        assert len(agents.files(RIGHT)) == 2

    asyncio.run(act())


def test_a_lost_nodes_files_are_found_where_else_they_are(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "shared", b"x" * 5000)
        await put(agents, LEFT, "alone", b"y")
        await agents[RIGHT].fetch("shared")
        await agents[HOME].lose(LEFT)
        assert await agents[HOME].files() == ["shared"]
        await agents[HOME].fetch("shared")
        assert (agents[HOME].path / "shared").stat().st_size == 5000

    asyncio.run(act())


LARGE = os.urandom(10_101)


def changed(data: bytes, *places: int) -> bytes:
    """The data with other bytes at these places."""
    return bytes(byte ^ 0xFF if place in places else byte for place, byte in enumerate(data))


async def crossed(agents: Agents) -> list[tuple[str, str, int, int]]:
    """Of each fetch that ended: destination, base, bytes by difference and bytes that did not match."""
    _, fetches = await agents[HOME].fetches()
    return [(one.node, one.fetch.base, one.sent.by_difference, one.sent.mismatched) for one in fetches]


def test_a_file_comes_as_the_difference_from_the_one_before_it(agents: Agents) -> None:
    async def act() -> None:
        await fetched(agents, FIRST, LARGE)
        agents.reads.clear()
        await fetched(agents, SECOND, changed(LARGE, 17, 3500, 10_000))
        assert agents.reads == {}, "witness: no piece was read whole"
        number, (_, second) = await agents[HOME].fetches()
        assert (second.node, second.fetch.source, second.fetch.base) == (RIGHT, LEFT, FIRST)
        assert second.sent.by_difference == 10_101
        assert second.sent.num_bytes < 11 * 40, "11 pieces of 1000 bytes, each with a head"
        await agents[HOME].drop(FIRST)
        await fetched(agents, THIRD, changed(LARGE, 18))
        _, (third,) = await agents[HOME].fetches(number)
        assert (third.fetch.base, third.sent.by_difference) == (SECOND, 10_101), "from what came as a difference itself"

    asyncio.run(act())


def test_pieces_that_changed_much_come_whole_beside_others(agents: Agents) -> None:
    async def act() -> None:
        await fetched(agents, FIRST, LARGE)
        agents.reads.clear()
        await fetched(agents, SECOND, changed(LARGE, *range(2000, 4000), 9))
        assert agents.reads == {LEFT: 2}
        _, (_, second) = await agents[HOME].fetches()
        assert second.sent.by_difference == 8101
        assert 2000 < second.sent.num_bytes < 2000 + 9 * 40

    asyncio.run(act())


def test_a_node_without_the_base_gets_the_file_whole(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, FIRST, LARGE)
        await fetched(agents, SECOND, changed(LARGE, 17))
        assert await crossed(agents) == [(RIGHT, "", 0, 0)]
        assert agents.reads == {LEFT: 11}
        for node in (LEFT, RIGHT):  # What a node has lost, without a word to anybody.
            (agents[node].path / SECOND).unlink()
            await fetched(agents, THIRD, changed(LARGE, 18))
            await agents[HOME].drop(THIRD)
            (agents[node].path / SECOND).write_bytes(changed(LARGE, 17))
        assert await crossed(agents) == [(RIGHT, "", 0, 0), *[(RIGHT, SECOND, 0, 0)] * 2]
        assert agents.reads == {LEFT: 33}

    asyncio.run(act())


def test_a_node_with_another_file_of_that_version_gets_the_right_one_whole(agents: Agents) -> None:
    async def act() -> None:
        await fetched(agents, FIRST, LARGE)
        (agents[RIGHT].path / FIRST).write_bytes(changed(LARGE, 4321))
        agents.reads.clear()
        await fetched(agents, SECOND, changed(LARGE, 17))
        assert agents.reads == {LEFT: 1}, "the one piece that differs"
        assert (await crossed(agents))[1] == (RIGHT, FIRST, 9101, 1000)
        _, (_, second) = await agents[HOME].fetches()
        assert 1000 < second.sent.num_bytes < 1000 + 11 * 40, "with the piece itself"
        for node in (LEFT, RIGHT):
            (agents[node].path / SECOND).write_bytes(b"short")
            await fetched(agents, THIRD, changed(LARGE, 18))
            await agents[HOME].drop(THIRD)
            (agents[node].path / SECOND).write_bytes(changed(LARGE, 17))
        assert (await crossed(agents))[2:] == [(RIGHT, SECOND, 0, 0)] * 2

    asyncio.run(act())


def test_a_difference_that_is_damaged_on_its_way_is_not_used(agents: Agents) -> None:
    async def act() -> None:
        await fetched(agents, FIRST, LARGE)
        difference = agents[LEFT].difference

        async def damaged(file: str, base: str, start: int, num_bytes: int) -> bytes:
            delta = await difference(file, base, start, num_bytes)
            return delta[:-1] + bytes([delta[-1] ^ 1]) if start in (3000, 5000) else delta

        agents[LEFT].difference = damaged
        await fetched(agents, SECOND, changed(LARGE, 3003, 5005))
        assert (await crossed(agents))[1] == (RIGHT, FIRST, 8101, 2000)

    asyncio.run(act())


def test_a_source_that_is_lost_while_it_compares_is_replaced_by_another(agents: Agents) -> None:
    async def act() -> None:
        await fetched(agents, FIRST, LARGE)
        await agents[HOME].fetch(FIRST)
        await put(agents, LEFT, SECOND, changed(LARGE, 17))
        await agents[HOME].fetch(SECOND)

        async def lost(file: str, base: str, start: int, num_bytes: int) -> bytes:
            raise WorkerError("power cut")

        async def cannot_be_read(node: str) -> None:
            if node == HOME:
                raise WorkerError("power cut")

        agents[HOME].difference, agents.before_read = lost, cannot_be_read
        await agents[RIGHT].fetch(SECOND)
        assert (agents[RIGHT].path / SECOND).read_bytes() == changed(LARGE, 17)
        assert agents.reads[HOME] >= 1, "witness: the lost one was asked first"
        _, fetches = await agents[HOME].fetches()
        assert (fetches[-1].fetch.source, fetches[-1].sent.by_difference) == (LEFT, 10_101)

    asyncio.run(act())


def test_with_deltas_off_files_come_whole(leases: dict[str, RunLeases]) -> None:
    async def act(agents: Agents) -> None:
        await fetched(agents, FIRST, LARGE)
        await fetched(agents, SECOND, LARGE)
        assert await crossed(agents) == [(RIGHT, "", 0, 0), (RIGHT, FIRST, 0, 0)]

    asyncio.run(act(Agents(leases, deltas=False)))


def test_weights_that_came_as_differences_have_the_digest_of_those_that_were_set(agents: Agents) -> None:
    torch.manual_seed(0)
    tree = heterogeneous_tree() | {"half": torch.randn(4001).bfloat16(), "w": torch.randn(300, 7)}

    async def act() -> None:
        one, other = (NodeObjectStore(Files(agents[node])) for node in (LEFT, RIGHT))
        update, before = tree, 0
        for version, share in enumerate((1.0, 0.0, 0.001, 0.01, 0.3, 1.0), start=8):  # From 10 on the key is longer.
            update = {
                name: torch.where(torch.rand(of.shape) < share, 0, of).to(of.dtype) for name, of in update.items()
            }
            update["w"].view(-1)[version : version + 3] = torch.tensor([float("nan"), -0.0, float("inf")])
            meta = await one.set(key := weights_key(PolicyName("solver"), Version(version)), update)
            assert checksum(await other.get(key)) == meta.checksum == checksum(update)
            await one.release(weights_key(PolicyName("solver"), Version(version - 1)))
            before, (fetch,) = await agents[HOME].fetches(before)
            assert fetch.sent.mismatched == 0
            assert bool(fetch.sent.by_difference) == (version > 8), "at least the gaps and the constant parts"

    asyncio.run(act())


@pytest.mark.parametrize("one_sided", [True], indirect=True)
def test_a_fetch_that_is_cancelled_again_and_again_waits_for_its_transfer_and_withdraws(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)
        began, go_on, written = asyncio.Event(), asyncio.Event(), Counter[str]()

        async def hold(node: str) -> None:
            began.set()
            await go_on.wait()
            written["transfers"] += 1

        agents.before_read = hold
        fetching = asyncio.ensure_future(agents[RIGHT].fetch("file"))
        await began.wait()
        for _ in range(3):
            fetching.cancel()
            await asyncio.sleep(0)
        assert not fetching.done(), "its block may not be written again yet"
        assert len(agents.offered) == 1
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert (written["transfers"], agents.offered) == (1, {}), "one of five transfers"
        assert not any(agents[RIGHT].path.iterdir())

    asyncio.run(act())


@pytest.mark.parametrize("one_sided", [True], indirect=True)
def test_an_offer_whose_answer_is_lost_is_withdrawn(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)
        offer = agents[LEFT].offer

        async def unheard(file: str, number: int) -> Offer:
            await offer(file, number)
            assert len(agents.offered) == 1, "witness: it was offered"
            raise WorkerError("power cut")

        agents[LEFT].offer = unheard
        with pytest.raises(ObjectError, match=r"from node left: .*power cut"):
            await agents[RIGHT].fetch("file")
        assert agents.offered == {}

    asyncio.run(act())


@pytest.mark.parametrize("one_sided", [True], indirect=True)
def test_what_was_offered_to_a_lost_node_is_withdrawn_for_it(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)
        fetch = await agents[HOME].begin_fetch("file", RIGHT, [])
        assert fetch is not None
        await agents[LEFT].offer("file", fetch.number)
        await agents[HOME].lose(HOME)
        assert len(agents.offered) == 1
        await agents[HOME].lose(RIGHT)
        assert agents.offered == {}

    asyncio.run(act())


@pytest.mark.parametrize("one_sided", [True], indirect=True)
def test_a_file_of_another_size_under_the_same_name_is_not_taken_for_the_one_that_is_fetched(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)
        (agents[LEFT].path / "file").write_bytes(b"y" * 4000)
        with pytest.raises(ObjectError, match="from node left: it has 4,000 bytes there, not 5,000"):
            await agents[RIGHT].fetch("file")
        assert agents.reads == {}
        assert not any(agents[RIGHT].path.iterdir())

    asyncio.run(act())
