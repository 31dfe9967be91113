"""Agents of three nodes in one process: files cross once, whole or not at all, whatever is lost or dropped."""

import asyncio
import errno
import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from flexmarl.cluster import node_agent
from flexmarl.cluster.interface import ClusterNode
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.node_agent import LocalAgent, NodeAgent
from flexmarl.errors import ObjectError, WorkerError
from flexmarl.objects.backends.node import NodeObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectMeta, RunCopy, TensorTree
from flexmarl.objects.settings import Verify
from flexmarl.testing.object_checks import check_object_store

HOME, LEFT, RIGHT = "home", "left", "right"


class Agents:
    """The agents of three nodes, which call one another directly. Reads of a node can be made to fail."""

    def __init__(self, root: Path) -> None:
        self.reads: Counter[str] = Counter()
        self.before_read: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the source before each piece; may raise."""
        self._agents = {
            name: LocalAgent(
                ClusterNode(name=name, id=name, address="", cpus=1, devices=0),
                home=HOME,
                leases=RunLeases(name, root=root),
                peers=self,
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
        self.reads[node] += 1
        if self.before_read:
            await self.before_read(node)
        data = (self._agents[node].path / file).read_bytes()[start : start + num_bytes]
        assert len(data) == num_bytes
        return memoryview(data)

    async def close(self) -> None:
        for agent in self._agents.values():
            await agent.close()


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


@contextmanager
def three_nodes() -> Iterator[Agents]:
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as folder:
        agents = Agents(Path(folder) / "runs")
        try:
            yield agents
        finally:
            asyncio.run(agents.close())
            assert list((Path(folder) / "runs").iterdir()) == []
            assert not any(agents[node].path.exists() for node in (HOME, LEFT, RIGHT))


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(node_agent, "PIECE_BYTES", 1000)
    with three_nodes() as found:
        yield found


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

    async def release(self, key: ObjectKey) -> None:
        await self._other.release(key)


def test_a_store_on_agents_keeps_the_laws_of_object_stores() -> None:
    with ExitStack() as stack:
        asyncio.run(check_object_store(lambda: SetHereGetThere(stack.enter_context(three_nodes()))))


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
        assert await agents[HOME].fetches() == {("file", RIGHT): 1}

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


def test_without_another_source_it_says_what_failed_and_leaves_nothing(agents: Agents) -> None:
    async def act() -> None:
        await put(agents, LEFT, "file", b"x" * 5000)

        async def fail(node: str) -> None:
            raise WorkerError("power cut")

        agents.before_read = fail
        with pytest.raises(ObjectError, match=r"'file' cannot be fetched to node 'right': from node left: .*power cut"):
            await agents[RIGHT].fetch("file")
        assert agents.files(RIGHT) == []
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

        async def ended(file: str, number: int, whole: bool) -> bool:
            current = await end_fetch(file, number, whole)
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
