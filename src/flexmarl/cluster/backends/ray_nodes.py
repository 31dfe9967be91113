"""Ray's nodes for a run: which there are, how their processes reach named actors, and the agent of each node.

RayAddress    reaches an actor by its name, from any process of the run
RayFiles      the run's files for the processes of one node, through that node's agent
RayAgents     the agents, as the controller sees them: starts, watches and ends them
"""

import asyncio
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError

from flexmarl.cluster.backends.mooncake import MooncakeMemory
from flexmarl.cluster.backends.ray_resident import ActorSlot, RayResident, all_of, reason
from flexmarl.cluster.host import Host, answer, packed
from flexmarl.cluster.interface import ClusterNode, ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.locations import Fetched
from flexmarl.cluster.node_agent import NodeAgent, agent_of
from flexmarl.cluster.proxy import reached
from flexmarl.errors import ConfigError, FlexmarlError, WorkerError
from flexmarl.records import WorkerId

LOOK_S = 2.0
"""Seconds between two looks at a node's agent."""
LOOKS = 2
"""Looks in a row that a lost agent has missed. One may be missed because the controller itself was busy."""
READY_S = 5.0
"""Seconds in which an agent must answer before residents are started on its node."""


def live_nodes() -> list[ClusterNode]:
    """The nodes of the Ray that this process has joined: its own first, then by name.

    Raises ConfigError if two of them have one name.
    """
    here = ray.get_runtime_context().get_node_id()
    found = [
        ClusterNode(
            name=one["NodeName"],
            id=one["NodeID"],
            address=one["NodeManagerAddress"],
            cpus=int(one["Resources"].get("CPU", 0)),
            devices=int(one["Resources"].get("GPU", 0)),
        )
        for one in ray.nodes()
        if one["Alive"]
    ]
    if shared := [name for name, number in Counter(node.name for node in found).items() if number > 1]:
        raise ConfigError(
            f"cluster.address: {len(found)} nodes of this Ray have names that are not unique: {', '.join(shared)}; "
            "start each with `ray start --node-name NAME`"
        )
    return sorted(found, key=lambda node: (node.id != here, node.name))


class RayAddress:
    """Reaches a named actor of the run: an `Address`."""

    def __init__(self, name: str) -> None:
        """`name` is the resident's."""
        self._name = name
        self._actor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the name alone; the other process looks the actor up."""
        return RayAddress, (self._name,)

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the actor that has the name now."""
        return answer(await self.plain(method, packed(*args, **kwargs)), name=self._name)

    async def plain(self, method: str, /, *args: Any) -> Any:
        """Calls a method of the actor itself, whose arguments and result Ray copies."""
        try:
            self._actor = self._actor or ray.get_actor(self._name)
            return await getattr(self._actor, method).remote(*args)
        except (RayError, ValueError) as error:  # ValueError: there is no actor of that name.
            self._actor = None
            raise WorkerError(f"{self._name} does not answer: {reason(error)}") from error


class AgentHost(Host):
    """A host of an agent, which gives out pieces of its files without packing them."""

    async def read_piece(self, file: str, start: int, num_bytes: int) -> np.ndarray:
        """Bytes of a file. Raises FileNotFoundError."""
        return np.memmap(self.hosted.path / file, dtype=np.uint8, mode="r", offset=start, shape=(num_bytes,))


class RayPeers:
    """The `Peers` of an agent: it reaches the agents of other nodes through Ray."""

    def __init__(self) -> None:
        self._addresses: dict[str, RayAddress] = {}

    def agent(self, node: str) -> NodeAgent:
        """The agent of a node, by its id."""
        return reached(NodeAgent, self._address(node))

    async def read(self, node: str, file: str, start: int, num_bytes: int) -> memoryview:
        """Bytes of a file on another node, through Ray's object transfer."""
        piece = await self._address(node).plain("read_piece", file, start, num_bytes)
        return memoryview(piece)

    def _address(self, node: str) -> RayAddress:
        return self._addresses.setdefault(node, RayAddress(agent_name(node)))


class RayFiles:
    """The run's files, for the processes of one node: `NodeFiles`."""

    def __init__(self, home: str = "") -> None:
        """Finds the agent when it is first needed."""
        self.home = home
        """Id of the controller's node, once the cluster is open."""
        self._agent: NodeAgent | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles no agent: the other process may be on another node."""
        return RayFiles, (self.home,)

    @property
    def at_home(self) -> bool:
        """True if this process is on the controller's node."""
        return ray.get_runtime_context().get_node_id() == self.home

    async def folder(self) -> Path:
        """The folder of this process's node."""
        return Path(await self._here().folder())

    async def announce(self, file: str) -> None:
        """Asks this node's agent."""
        await self._here().announce(file)

    async def fetch(self, file: str) -> None:
        """Asks this node's agent."""
        await self._here().fetch(file)

    async def drop(self, file: str) -> None:
        """Asks this node's agent."""
        await self._here().drop(file)

    def _here(self) -> NodeAgent:
        if self._agent is None:
            self._agent = RayPeers().agent(ray.get_runtime_context().get_node_id())
        return self._agent


def folder_of_node() -> Path:
    """The run's folder on this process's node. It waits for the agent, where no event loop may be awaited."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(lambda: asyncio.run(RayFiles().folder())).result()


def agent_name(node: str) -> WorkerId:
    """The name of the agent of a node, given by its id."""
    return WorkerId(ResidentKind.NODE, node)


class RayAgents:
    """The run's agents on all of its nodes. None on a private Ray, where the controller does their work."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        leases: RunLeases,
        *,
        timeout_s: float,
        lost: Callable[[ClusterNode, str], None],
        fetched: Callable[[Fetched], None],
        deltas: bool = False,
        one_sided: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """`lost` is called with a node that is lost and the reason. An agent is lost after `timeout_s` of silence.

        `fetched` is called with each fetch of a file, soon after it. `deltas`: files may come as differences.
        `one_sided`: files are read from other nodes by Mooncake. `memory_bytes`: as for an agent.
        """
        self._fetched, self._deltas, self._fetches_seen = fetched, deltas, 0
        self._one_sided, self._memory_bytes = one_sided, memory_bytes
        self._tasks, self._leases, self._timeout_s, self._lost = tasks, leases, timeout_s, lost
        self._agents: dict[ClusterNode, RayResident[NodeAgent]] = {}
        self._home: ClusterNode | None = None

    async def start(self, nodes: Sequence[ClusterNode], *, visible: Mapping[ClusterNode, Sequence[Path]]) -> None:
        """Starts an agent on each node, the first of which is home.

        Raises ConfigError that names a node which cannot be used: another version of Python or flexmarl, or one of its
        paths in `visible` is not there.
        """
        self._home = nodes[0]
        self._agents = {node: self._agent(node) for node in nodes}
        await all_of(self._start(node, agent, visible[node]) for node, agent in self._agents.items())
        for node, agent in self._agents.items():
            self._tasks.create_task(self._watch(node, agent), name=f"watch node {node.name}")

    async def add(self, node: ClusterNode, *, visible: Sequence[Path]) -> None:
        """Starts an agent on a node that has come. Raises ConfigError as `start` does; then nothing is there."""
        agent = self._agent(node)
        try:
            await self._start(node, agent, visible)
        except BaseException:
            agent.end("was not used")
            raise
        self._agents[node] = agent
        self._tasks.create_task(self._watch(node, agent), name=f"watch node {node.name}")

    async def add_processes(self, node: ClusterNode, pids: Iterable[int]) -> None:
        """Records processes that end with the run, on their node; those of a lost node have ended."""
        if self._is_local(node):
            self._leases.add_processes(pids)
        elif agent := self._agents.get(node):
            await agent.remote.add_processes(list(pids))

    async def process_ended(self, node: ClusterNode, pid: int, timeout_s: float) -> None:
        """Waits until a process has ended, but no longer than `timeout_s`. Those of a lost node have ended."""
        if self._is_local(node):
            with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                await asyncio.to_thread(psutil.Process(pid).wait, timeout_s)
        elif agent := self._agents.get(node):
            with suppress(WorkerError):
                await agent.remote.process_ended(pid, timeout_s)

    async def look(self) -> None:
        """Asks all agents for a sign of life, so that nothing is started on a node that has just been lost."""
        await all_of(self._look(node, agent) for node, agent in list(self._agents.items()))

    def is_home(self, node: ClusterNode) -> bool:
        """True for the node of the controller."""
        return node == self._home

    def lose(self, node: ClusterNode) -> None:
        """Ends the agent of a lost node. Its files are forgotten at home."""
        if agent := self._agents.pop(node, None):
            agent.end("is on a lost node")
        if node != self._home and self._home in self._agents:
            self._tasks.create_task(self._forget(node), name=f"forget node {node.name}")

    async def close(self) -> None:
        """Ends the agents, and with them what the run has on their nodes."""
        if home := self._agents.get(self._home) if self._home else None:
            await self._report_fetches(home)
        agents, self._agents = list(self._agents.values()), {}
        await all_of(agent.remote.close() for agent in agents)
        for agent in agents:
            agent.end("was stopped")
        await all_of(agent.quiet() for agent in agents)

    def _agent(self, node: ClusterNode) -> RayResident[NodeAgent]:
        assert self._home is not None
        make = partial(
            agent_of,
            node,
            home=self._home.id,
            run=self._leases.run,
            root=self._leases.root,
            make_peers=RayPeers,
            make_memory=partial(MooncakeMemory, node.address) if self._one_sided else None,
            deltas=self._deltas,
            memory_bytes=self._memory_bytes,
        )
        spec = ResidentSpec(name=agent_name(node.id), kind=ResidentKind.NODE, contract=NodeAgent, make=make)
        return RayResident(
            spec,
            ActorSlot(node),
            tasks=self._tasks,
            on_end=lambda _, lost: self._lost(node, f"its agent is lost: {lost}") if lost else None,
            process_ended=_nothing_to_wait_for,
            host=AgentHost,
        )

    async def _start(self, node: ClusterNode, agent: RayResident[NodeAgent], visible: Sequence[Path]) -> None:
        try:
            await agent.start()
            await agent.make()
            facts = await agent.remote.facts([str(path) for path in visible])
        except FlexmarlError as error:
            raise ConfigError(
                f"node '{node.name}' cannot be used: {error}; install flexmarl {version('flexmarl')} there, as on this "
                "machine, or leave the node out with cluster.pools"
            ) from error
        if self._is_local(node):
            self._leases.add_processes([agent.place.pid])
        for what, ours, theirs in (
            ("Python", platform.python_version(), facts.python),
            ("flexmarl", version("flexmarl"), facts.flexmarl),
        ):
            if ours != theirs:
                raise ConfigError(f"node '{node.name}' has {what} {theirs}, this machine has {ours}; install the same")
        if facts.missing:
            raise ConfigError(
                f"node '{node.name}' does not see {', '.join(facts.missing)}; use a folder that all nodes share, copy "
                "models and code there, or leave the node out with cluster.pools: only nodes with trainers need the "
                "run's folder"
            )

    async def _watch(self, node: ClusterNode, agent: RayResident[NodeAgent]) -> None:
        """Looks at an agent until it is lost. A lost process is noticed by its resident, silence only here."""
        missed = 0
        while node in self._agents:
            await asyncio.sleep(LOOK_S)
            missed = 0 if await self._answers(agent, self._timeout_s / LOOKS) else missed + 1
            if node == self._home and not missed:
                await self._report_fetches(agent)
            if missed == LOOKS:
                self._lost(node, f"its agent did not answer for {self._timeout_s:g} s")
                return

    async def _look(self, node: ClusterNode, agent: RayResident[NodeAgent]) -> None:
        if not await self._answers(agent, READY_S):
            self._lost(node, f"its agent did not answer within {READY_S:g} s")

    async def _answers(self, agent: RayResident[NodeAgent], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await agent.remote.facts([])
        except (TimeoutError, WorkerError):
            return False
        return True

    async def _report_fetches(self, home: RayResident[NodeAgent]) -> None:
        """Reports the fetches that ended since the last look at home."""
        with suppress(WorkerError, TimeoutError):
            async with asyncio.timeout(self._timeout_s / LOOKS):
                self._fetches_seen, new = await home.remote.fetches(self._fetches_seen)
            for one in new:
                self._fetched(one)

    async def _forget(self, node: ClusterNode) -> None:
        assert self._home is not None
        with suppress(WorkerError):  # Without home the run ends anyway.
            await self._agents[self._home].remote.lose(node.id)

    def _is_local(self, node: ClusterNode) -> bool:
        return self._home in (None, node)


async def _nothing_to_wait_for(pid: int) -> None:
    """Returns at once: what an agent held is gone when it has been closed."""
