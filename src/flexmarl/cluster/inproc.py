"""Cluster in this process: residents are objects here, and nodes are only names. It also runs on a virtual clock.

A resident's `remote` is the hosted object itself. With `crosses`, or if its kind is in `crossing`, it is a proxy, as
for a resident in another process, and everything that goes through the proxy is copied: for tests of code whose calls
cross.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

from flexmarl.cluster.concurrency import task_block
from flexmarl.cluster.host import Host, answer, packed
from flexmarl.cluster.interface import (
    ClusterNode,
    Resident,
    ResidentKind,
    ResidentPlace,
    ResidentSpec,
    require_new_names,
    require_one_process,
)
from flexmarl.cluster.placement import NoRoom, Placed, PoolNodes, RoomRequest, place
from flexmarl.cluster.proxy import CLOSE_TIMEOUT_S, methods_of, proxy_of
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.events.event import Events
from flexmarl.events.run_events import WorkerLost
from flexmarl.records import WorkerId

T = TypeVar("T")
LOCAL_NODE = "here"
"""The one node of a cluster that is given no nodes."""
FIRST_PID = 1000
"""Pids are made up: they only tell residents apart."""
NO_LIMIT = 2**31
EVERYWHERE = "all"
"""The one pool of this cluster."""


class InprocResident(Generic[T]):
    """A resident that is one object of this process."""

    def __init__(
        self,
        spec: ResidentSpec[T],
        place: ResidentPlace,
        *,
        on_end: Callable[["InprocResident[Any]", str], None],
        latency_s: float,
    ) -> None:
        """`on_end` is called once when it ends, with the reason if it was lost. A crossing takes twice `latency_s`."""
        self.spec, self.place = spec, place
        self.crossings: list[str] = []
        """Methods that were called through a crossing, in order."""
        self._on_end, self._latency_s = on_end, latency_s
        self._host = Host()
        self._remote: Any = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._hangs = False
        self._work_under_way: set[asyncio.Task[bytes]] = set()

    @property
    def name(self) -> WorkerId:
        """The name in its spec."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """True until it is stopped or dies."""
        return not self._ended.done()

    @property
    def made(self) -> bool:
        """True once the hosted object is made. Until then a death is reported by the error of `spawn` alone."""
        return self._remote is not None

    @property
    def hosted(self) -> T:
        """The hosted object, for tests and for faults."""
        return self._host.hosted

    @property
    def remote(self) -> T:
        """The hosted object, or its proxy."""
        return self._remote

    def require_alive(self) -> None:
        """Raises WorkerError if it was stopped or died."""
        if not self.alive:
            raise WorkerError(f"{self.name} {self._ended.result()}")

    def make(self) -> None:
        """Makes the hosted object. The spec's `make` is not copied, so residents can share objects that it holds."""
        self._remote = self._host.hosted = self.spec.make()

    def cross_with(self, tasks: asyncio.TaskGroup) -> None:
        """Makes `remote` a proxy, whose tasks run in `tasks`."""
        self._remote = proxy_of(self.spec, self, tasks)

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the host or the hosted object: the `Channel` of the resident's proxy."""
        self.crossings.append(method)
        if self.alive:
            work = asyncio.create_task(self._work(method, packed(*args, **kwargs)), name=f"{self.name}.{method}")
            self._work_under_way.add(work)
            work.add_done_callback(self._work_under_way.discard)
            # A cancelled caller stops waiting, but its work is not cancelled.
            await asyncio.wait((work, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if self.alive:
                return answer(work.result(), name=self.name)
        raise WorkerError(f"{self.name} {self._ended.result()}")

    async def stop(self) -> None:
        """Ends it. Closes the hosted object too, if there is no proxy and its contract has `close`."""
        if self.alive:
            self.end("was stopped", "")
            if self.made and self._remote is self._host.hosted and "close" in methods_of(self.spec.contract):
                with suppress(TimeoutError):  # An object that never answers must not keep the others from ending.
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._remote.close()

    def die(self, because: str = "was killed") -> None:
        """A fault: ends it as a crash would. Its work under way is cancelled, and the loss is reported."""
        self.end(f"died: {because}", because)

    def hang(self) -> None:
        """A fault: from now on no call returns."""
        self._hangs = True

    def end(self, how: str, because: str) -> None:
        """Ends it, unless it has ended. `because` is empty if this is not a loss."""
        if self.alive:
            self._ended.set_result(how)
            for work in list(self._work_under_way):
                work.cancel()
            self._on_end(self, because)

    async def _work(self, method: str, arguments: bytes) -> bytes:
        await asyncio.sleep(self._latency_s)
        own = getattr(self._host, method, None)
        reply = await (own(arguments) if own else self._host.call_method(method, arguments))
        await asyncio.sleep(self._latency_s)
        if self._hangs:
            await asyncio.Event().wait()
        return reply


@asynccontextmanager
async def inproc_cluster(
    nodes: Mapping[str, int] | None = None,
    *,
    start_s: float = 0.0,
    crosses: bool = False,
    crossing: Collection[ResidentKind] = (),
    latency_s: float = 0.0,
    events: Events | None = None,
) -> AsyncIterator["InprocCluster"]:
    """Opens a cluster for the length of a block.

    `nodes` gives the number of residents that each node has room for; None means one node without a limit. A spawn
    takes `start_s`. With `crosses`, or to kinds in `crossing`, calls are copied and take `latency_s` each way. Losses
    are emitted to `events`.
    """
    async with task_block() as tasks:
        cluster = InprocCluster(
            tasks,
            nodes or {LOCAL_NODE: NO_LIMIT},
            start_s=start_s,
            crosses=crosses,
            crossing=crossing,
            latency_s=latency_s,
            events=events or Events(),
        )
        try:
            yield cluster
        finally:
            await cluster.close()


class InprocCluster:
    """A `Cluster` of objects in this process.

    async with inproc_cluster({"node-0": 8}, start_s=30.0) as cluster:
        (resident,) = await cluster.spawn([spec])
        cluster.kill(resident.name, "its node lost power")
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        nodes: Mapping[str, int],
        *,
        start_s: float,
        crosses: bool,
        latency_s: float,
        events: Events,
        crossing: Collection[ResidentKind] = (),
    ) -> None:
        """See `inproc_cluster`. Proxies run their tasks in `tasks`."""
        self.events = events
        self.residents: list[InprocResident[Any]] = []
        """All residents that were made, in order, including ended ones."""
        self._tasks = tasks
        self._room = dict(nodes)
        """Live nodes, and how many residents fit on each."""
        self._held: dict[WorkerId, Placed] = {}
        self._start_s, self._latency_s = start_s, latency_s
        self._crosses, self._crossing = crosses, frozenset(crossing)
        self._pids = itertools.count(FIRST_PID)

    @property
    def nodes(self) -> Sequence[ClusterNode]:
        """The nodes that it was given and that are not lost."""
        return [ClusterNode(name=name, id=name, address="", cpus=room, devices=0) for name, room in self._room.items()]

    @property
    def crosses(self) -> bool:
        """True if calls are copied."""
        return self._crosses

    @property
    def has_processes(self) -> bool:
        """True if it was given nodes: every resident then stands for a process."""
        return LOCAL_NODE not in self._room

    async def spawn(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        """Starts each resident on the node that its spec names, or that the rule chooses (placement.py)."""
        for spec in specs:
            require_one_process(spec, nodes=list(self._room))
        require_new_names(specs, taken=[resident.name for resident in self.residents if resident.alive])
        residents = self._placed(specs)
        self.residents.extend(residents)
        try:
            if self._start_s:
                await asyncio.sleep(self._start_s)
            for resident in residents:
                resident.require_alive()
                resident.make()
        except BaseException:
            for resident in residents:
                await resident.stop()
            self.residents = [resident for resident in self.residents if resident not in residents]
            raise
        for resident in residents:
            if self._crosses or resident.spec.kind in self._crossing:
                resident.cross_with(self._tasks)
        return list(residents)

    def has_room(self, specs: Sequence[ResidentSpec[Any]], *, without: Collection[WorkerId] = ()) -> bool:
        """See `Cluster.has_room`."""
        new = [spec for spec in specs if spec.name not in self._held]
        return not isinstance(self._place(new, without=without), NoRoom)

    async def close(self) -> None:
        """Stops every resident, the youngest first."""
        for resident in reversed(self.residents):
            await resident.stop()

    def kill(self, name: WorkerId, because: str = "was killed") -> None:
        """A fault: the live resident with this name dies. Raises KeyError if there is none."""
        live = {resident.name: resident for resident in self.residents if resident.alive}
        live[name].die(because)

    def kill_node(self, node: str, because: str = "its node was lost") -> list[WorkerId]:
        """A fault: every live resident on a node dies, and nothing starts there any more. Returns their names."""
        self._room.pop(node, None)
        dying = [resident for resident in self.residents if resident.alive and resident.place.node == node]
        for resident in dying:
            resident.die(because)
        return [resident.name for resident in dying]

    def _placed(self, specs: Sequence[ResidentSpec[T]]) -> list[InprocResident[T]]:
        """Gives each resident a place by the rule of all clusters. Raises ConfigError without room."""
        placed = self._place(specs)
        if isinstance(placed, NoRoom):
            raise ConfigError(f"no room for {len(specs)} more residents: {placed.because}; give the cluster more nodes")
        self._held |= {one.request.name: one for one in placed}
        nodes_of = {one.request.name: one.node for one in placed}
        return [
            InprocResident(
                spec,
                ResidentPlace(node=nodes_of[spec.name], pid=next(self._pids)),
                on_end=self._ended,
                latency_s=self._latency_s,
            )
            for spec in specs
        ]

    def _place(
        self, specs: Sequence[ResidentSpec[Any]], *, without: Collection[WorkerId] = ()
    ) -> list[Placed] | NoRoom:
        # No resident takes turns here: a node's room is a number of residents.
        requests = [
            RoomRequest(name=spec.name, devices=0, pool=EVERYWHERE, node=spec.node, group=spec.group) for spec in specs
        ]
        pools = {EVERYWHERE: PoolNodes(nodes=frozenset(self._room))}
        held = [one for name, one in self._held.items() if name not in without]
        return place(requests, nodes=self.nodes, pools=pools, held=held)

    def _ended(self, resident: InprocResident[Any], because: str) -> None:
        place = resident.place
        self._held.pop(resident.name, None)
        if because and resident.made:
            self.events.emit(WorkerLost(process=resident.name, node=place.node, pid=place.pid, because=because))
