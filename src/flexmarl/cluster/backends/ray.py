"""Ray for the residents of a run: a private Ray of this machine, or one that others started, on one node or several.

On a Ray that others started, each node has an agent of the run (node_agent.py). An agent that is lost is a node that is
lost. Where there are several nodes, one that comes later is taken in. On a private Ray the controller looks after its
one node itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from flexmarl.cluster.backends.ray_nodes import RayAddress, RayAgents, RayFiles, folder_of_node, live_nodes
from flexmarl.cluster.backends.ray_resident import START_S, ActorSlot, RayResident, all_of
from flexmarl.cluster.backends.ray_session import JoinedRay, PrivateRay
from flexmarl.cluster.concurrency import OwnThread, task_block
from flexmarl.cluster.inproc import LOCAL_NODE, NO_LIMIT, InprocCluster
from flexmarl.cluster.interface import (
    ClusterNode,
    Resident,
    ResidentKind,
    ResidentSpec,
    require_new_names,
    require_one_process,
)
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.locations import Fetched
from flexmarl.cluster.placement import NoRoom, Placed, PoolNodes, RoomRequest, needed, place
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import ConfigError, FlexmarlError, WorkerError
from flexmarl.events.event import Events
from flexmarl.events.run_events import NodeJoined, NodeLost, ObjectFetched, WorkerLost
from flexmarl.records import WorkerId

__all__ = ["RayAddress", "RayCluster", "RayFiles", "folder_of_node", "ray_cluster"]
T = TypeVar("T")
# A placement that is possible takes 0.1 s. A longer one waits for other users' processes to end.
PLACE_S = 5.0
STOP_S = 10.0
WATCH_S = 0.5
JOIN_S = 2.0
"""Seconds between two looks for nodes that have come."""
POOL_OF: dict[ResidentKind, Literal["rollout", "training"]] = {
    ResidentKind.ENGINE: "rollout",
    ResidentKind.ROLLOUT: "rollout",
    ResidentKind.TRAINER: "training",
    ResidentKind.RANK: "training",
}
"""The pool of each kind of resident that has one."""
Visible = Mapping[Literal["rollout", "training"], Sequence[Path]]
"""Paths by the pool whose nodes must see them."""
NO_POOL = "none"
"""Pool of residents that name their node."""
ADVICE = (
    "use fewer instances, cluster.device=cpu, or cluster.address=local, which has a CPU for every resident of one "
    "machine"
)


@asynccontextmanager
async def ray_cluster(
    settings: ClusterSettings,
    *,
    leases: RunLeases,
    residents: int,
    events: Events | None = None,
    visible: Visible | None = None,
    deltas: bool = False,
    memory_bytes: int | None = None,
) -> AsyncIterator["RayCluster"]:
    """Opens a cluster for the length of a block, with at most `residents` residents alive at once.

    A private Ray has room for exactly that many. What happens to nodes, residents and files is emitted to `events`. The
    nodes of each pool must see the paths that `visible` has for it. `deltas`: files may cross as differences.
    `memory_bytes`: files of a node beyond so many are on disk; None: none is. Raises ConfigError if the Ray to join or
    one of its nodes cannot be used, WorkerError if Ray does not answer within `START_S`.
    """
    async with task_block() as tasks:
        cluster = RayCluster(
            settings,
            tasks,
            leases=leases,
            residents=residents,
            events=events or Events(),
            deltas=deltas,
            memory_bytes=memory_bytes,
        )
        try:
            await cluster.open(visible or {})
            yield cluster
        finally:
            await cluster.close()


class RayCluster:
    """The residents of one run, on a private Ray or on the nodes of one that already runs."""

    def __init__(
        self,
        settings: ClusterSettings,
        tasks: asyncio.TaskGroup,
        *,
        leases: RunLeases,
        residents: int,
        events: Events,
        deltas: bool,
        memory_bytes: int | None,
    ) -> None:
        """See `ray_cluster`. Proxies run their tasks in `tasks`."""
        self.events = events
        self._settings, self._leases = settings, leases
        if settings.address == "local":
            self._ray = PrivateRay(leases, workers=residents, accelerators=settings.device != "cpu")
        else:
            self._ray = JoinedRay(leases, address=settings.address)
        self._agents = RayAgents(
            tasks,
            leases,
            timeout_s=settings.node_timeout_s,
            lost=self._lose,
            fetched=self._fetched,
            deltas=deltas,
            one_sided=settings.transport == "mooncake",
            memory_bytes=memory_bytes,
        )
        self._thread = OwnThread("ray")
        self._nodes: dict[str, ClusterNode] = {}
        """Live nodes by name, the controller's first."""
        self._pools: dict[str, PoolNodes] = {}
        self._tasks = tasks
        self._here = InprocCluster(
            tasks, {LOCAL_NODE: NO_LIMIT}, start_s=0.0, crosses=False, latency_s=0.0, events=self.events
        )
        """The residents in this process."""
        self._residents: set[RayResident[Any]] = set()
        self._placing: list[Placed] = []
        """Places of residents that are being started, until they are in `_residents`."""
        self._rooms: dict[tuple[str, int], ActorSlot] = {}
        """Slots of live residents and of those being started, by node and room. Two that take turns have one slot."""
        self._free: list[ActorSlot] = []
        self._reserving = asyncio.Lock()
        self._visible: Visible = {}
        self._seen: set[str] = set()
        """Ids of the nodes that this Ray has or had."""
        self._watches: list[asyncio.Task[None]] = []
        self._failure: str | None = None
        self._closed = False

    @property
    def nodes(self) -> Sequence[ClusterNode]:
        return list(self._nodes.values())

    @property
    def crosses(self) -> bool:
        return True

    @property
    def has_processes(self) -> bool:
        return True

    @property
    def agents(self) -> RayAgents:
        """The run's agents on its nodes."""
        return self._agents

    async def open(self, visible: Visible) -> None:
        """Starts or joins Ray, and starts the agents of its nodes if it is another's."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        await self._ask(self._ray.open, timeout=START_S)
        nodes = await self._ask(live_nodes, timeout=STOP_S)
        self._visible, self._seen = visible, {node.id for node in nodes}
        self._pools = pools_of(self._settings, [node.name for node in nodes])
        self._nodes = {node.name: node for node in nodes if node is nodes[0] or self._pools_with(node)}
        self._watches.append(self._tasks.create_task(self._watch_ray(), name="watch ray"))
        if self._settings.address != "local":
            await self._agents.start(self.nodes, visible={node: self._paths_for(node) for node in self.nodes})
        if len(self._nodes) > 1:  # Otherwise nothing serves the store to other nodes.
            self._watches.append(self._tasks.create_task(self._watch_for_nodes(), name="watch for new nodes"))

    async def spawn(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        here = await self._here.spawn([spec for spec in specs if spec.in_controller])
        try:
            actors = await self._spawn_actors([spec for spec in specs if not spec.in_controller])
        except BaseException:
            for resident in here:
                await resident.stop()
            raise
        started = {resident.name: resident for resident in [*here, *actors]}
        return [started[spec.name] for spec in specs]

    async def _spawn_actors(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        await self._agents.look()
        if self._failure is not None:
            raise WorkerError(f"no new residents: {self._failure}")
        for spec in specs:
            require_one_process(spec, nodes=list(self._nodes), own_python=True)
        require_new_names(specs, taken=[resident.name for resident in self._residents])
        placed = self._placed(specs)
        self._placing += placed
        try:
            slots = await self._slots(placed)
        finally:
            self._placing = [one for one in self._placing if one not in placed]
        residents = [
            RayResident(
                spec,
                slot,
                tasks=self._tasks,
                on_end=self._ended,
                process_ended=partial(self._agents.process_ended, slot.node, timeout_s=STOP_S),
                placed=one,
            )
            for spec, slot, one in zip(specs, slots, placed, strict=True)
        ]
        self._residents.update(residents)
        try:
            await all_of(resident.start() for resident in residents)
            for node in {resident.slot.node for resident in residents}:
                await self._agents.add_processes(
                    node, [resident.place.pid for resident in residents if resident.slot.node == node]
                )
            await all_of(resident.make() for resident in residents)
        except BaseException:
            await all_of(resident.stop() for resident in residents)
            raise
        return list(residents)

    def has_room(self, specs: Sequence[ResidentSpec[Any]], *, without: Collection[WorkerId] = ()) -> bool:
        held = {one.request.name for one in self._held()}
        new = [spec for spec in specs if not spec.in_controller and spec.name not in held]
        return self._failure is None and not isinstance(self._place(new, without=without), NoRoom)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for watch in self._watches:
            watch.cancel()
        await self._here.close()
        residents = list(self._residents)
        for resident in residents:
            resident.end("was stopped")
        await self._agents.close()
        await all_of(resident.quiet() for resident in residents)
        with suppress(WorkerError):
            await self._ask(self._ray.close, timeout=STOP_S)
        self._thread.close()
        await asyncio.to_thread(self._leases.end_processes)

    def _placed(self, specs: Sequence[ResidentSpec[Any]]) -> list[Placed]:
        """A node for each resident. Raises ConfigError if one has no room."""
        placed = self._place(specs)
        if isinstance(placed, NoRoom):
            cpus, gpus = needed(requests_of(specs))
            asked = f"{cpus} CPU and {gpus} GPU"
            raise ConfigError(f"no room for {len(specs)} more residents, {asked}: {placed.because}; {ADVICE}")
        return placed

    def _place(
        self, specs: Sequence[ResidentSpec[Any]], *, without: Collection[WorkerId] = ()
    ) -> list[Placed] | NoRoom:
        held = [one for one in self._held() if one.request.name not in without]
        return place(requests_of(specs), nodes=self.nodes, pools=self._pools, held=held)

    def _held(self) -> list[Placed]:
        """The places of all residents that live or are being started."""
        return [*self._placing, *(resident.placed for resident in self._residents if resident.placed is not None)]

    async def _slots(self, placed: Sequence[Placed]) -> list[ActorSlot]:
        """A slot for each resident: that of its room, a free one of its node, or one of a new group for each node."""
        async with self._reserving:
            new_rooms = {(one.node, one.room): one for one in placed if (one.node, one.room) not in self._rooms}
            found = {room: slot for room, one in new_rooms.items() if (slot := self._take(one))}
            try:
                for name in sorted({node for node, _ in new_rooms.keys() - found.keys()}):
                    missing = [room for room in new_rooms if room[0] == name and room not in found]
                    gpus = [new_rooms[room].request.devices for room in missing]
                    reserving = partial(reserve, gpus, node=self._nodes[name])
                    slots = await self._ask(reserving, timeout=PLACE_S + STOP_S)
                    found |= dict(zip(missing, slots, strict=True))
            except BaseException:
                self._free += found.values()
                raise
            self._rooms |= found
            return [self._rooms[one.node, one.room] for one in placed]

    def _take(self, placed: Placed) -> ActorSlot | None:
        for slot in self._free:
            if (slot.node.name, slot.gpus) == (placed.node, placed.request.devices):
                self._free.remove(slot)
                return slot
        return None

    async def _ask(self, work: Callable[[], T], *, timeout: float) -> T:
        try:
            return await self._thread.run(work, timeout=timeout)
        except TimeoutError:
            raise WorkerError(f"Ray did not answer within {timeout:.0f} s") from None

    def _ended(self, resident: RayResident[Any], lost: str | None) -> None:
        self._residents.discard(resident)
        self._vacate(resident)
        if lost is not None:
            place = resident.place
            event = WorkerLost(process=resident.name, node=place.node, pid=place.pid, because=lost)
            asyncio.get_running_loop().call_soon(self.events.emit, event)

    def _vacate(self, resident: RayResident[Any]) -> None:
        """Frees the room of a resident that has ended, unless another one takes turns with it."""
        placed = resident.placed
        assert placed is not None, "only agents have no room, and they are none of the cluster's residents"
        room = placed.node, placed.room
        if any((one.node, one.room) == room for one in self._held()):
            return
        slot = self._rooms.pop(room)
        if slot.node.name in self._nodes:
            self._free.append(slot)

    def _lose(self, node: ClusterNode, because: str) -> None:
        """Ends everything on a node that is lost. Without the controller's own agent, the run cannot go on at all."""
        if self._closed or self._nodes.pop(node.name, None) is None:
            return
        self._free = [slot for slot in self._free if slot.node != node]
        asyncio.get_running_loop().call_soon(self.events.emit, NodeLost(node=node.name, because=because))
        everything = self._agents.is_home(node)
        if everything:
            self._failure = f"node '{node.name}' of the controller is lost: {because}"
        for resident in list(self._residents):
            if everything or resident.slot.node == node:
                lost = f"node '{node.name}' is lost: {because}"
                resident.end(f"is lost: {lost}", lost=lost)
        self._agents.lose(node)

    async def _watch_for_nodes(self) -> None:
        """Takes in nodes that come to this Ray while the run plays, if a pool may use them."""
        while self._failure is None:
            await asyncio.sleep(JOIN_S)
            with suppress(ConfigError, WorkerError):  # A name was given twice, or Ray does not answer now.
                live = await self._ask(live_nodes, timeout=STOP_S)
                await all_of(self._take_in(node) for node in live if node.id not in self._seen)

    async def _take_in(self, node: ClusterNode) -> None:
        self._seen.add(node.id)
        because = ""
        self._pools = {name: self._joined(name, pool, node) for name, pool in self._pools.items()}
        if not self._pools_with(node):
            return
        try:
            await self._agents.add(node, visible=self._paths_for(node))
            self._nodes[node.name] = node  # Before this, nothing is placed there, whatever its pools.
        except FlexmarlError as error:
            because = str(error)
        self.events.emit(NodeJoined(node=node.name, refused=because))

    def _joined(self, name: str, pool: PoolNodes, node: ClusterNode) -> PoolNodes:
        """The pool with the node, unless its settings name its nodes."""
        asked = {str(key): one for key, one in self._settings.pools.items()}.get(name)
        named = asked is not None and asked.nodes is not None
        return pool if named or name == NO_POOL else replace(pool, nodes=pool.nodes | {node.name})

    def _pools_with(self, node: ClusterNode) -> list[str]:
        """Names of the pools that may use the node."""
        return [name for name, pool in self._pools.items() if node.name in pool.nodes]

    def _paths_for(self, node: ClusterNode) -> list[Path]:
        """The paths that the node must see."""
        pools = self._pools_with(node)
        return [path for name, paths in self._visible.items() if name in pools for path in paths]

    def _fetched(self, one: Fetched) -> None:
        names = {node.id: node.name for node in self.nodes}
        self.events.emit(
            ObjectFetched(
                node=names.get(one.node, one.node),
                source=names.get(one.fetch.source, one.fetch.source),
                object=key_of(one.file),
                base=key_of(one.fetch.base) if one.sent.by_difference else "",
                num_bytes=one.fetch.num_bytes,
                sent_bytes=one.sent.num_bytes,
                mismatched_bytes=one.sent.mismatched,
            )
        )

    async def _watch_ray(self) -> None:
        """Waits until Ray itself is gone, and then ends all residents as lost."""
        while self._failure is None:
            await asyncio.sleep(WATCH_S)
            failure = await asyncio.to_thread(self._ray.failure)
            self._failure = self._failure or failure  # Read after the wait, in which a node may have been lost.
        for resident in list(self._residents):
            resident.end(f"is lost: {self._failure}", lost=self._failure)


def key_of(file: str) -> str:
    """The key of the object in a file.

    >>> key_of("weights%2Fsolver%2F3.object")
    'weights/solver/3'
    """
    return unquote(file.removesuffix(".object"))


def requests_of(specs: Sequence[ResidentSpec[Any]]) -> list[RoomRequest]:
    """The room that residents ask for, outside of the controller's process."""
    return [
        RoomRequest(
            name=spec.name,
            devices=spec.devices,
            pool=POOL_OF.get(spec.kind, NO_POOL),
            node=spec.node,
            group=spec.group,
            takes_turns=spec.takes_turns,
        )
        for spec in specs
    ]


def pools_of(settings: ClusterSettings, nodes: Sequence[str]) -> dict[str, PoolNodes]:
    """The nodes of each pool. Raises ConfigError if one is not among `nodes`, the live ones of this Ray."""
    pools = {NO_POOL: PoolNodes(nodes=frozenset())}
    for name in POOL_OF.values():
        asked = settings.pools.get(name)
        if asked is not None and (unknown := sorted({*(asked.nodes or ())} - {*nodes})):
            raise ConfigError(
                f"cluster.pools.{name}.nodes: there is no live node '{unknown[0]}'; this Ray has {', '.join(nodes)}"
            )
        allowed = nodes if asked is None or asked.nodes is None else asked.nodes
        pools[name] = PoolNodes(nodes=frozenset(allowed), devices=asked.devices if asked else None)
    return pools


def reserve(gpus: Sequence[int], *, node: ClusterNode) -> list[ActorSlot]:
    """Reserves a slot on a node for each number of accelerators in `gpus`. Raises ConfigError if one has no room."""
    bundles = [{"CPU": 1.0, **({"GPU": float(n)} if n else {})} for n in gpus]
    on_node = [{"ray.io/node-id": node.id}] * len(bundles)
    group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=on_node)
    if not group.wait(PLACE_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"no room for {len(gpus)} more residents on {node.name} within {PLACE_S:.0f} s: they need {len(gpus)} CPU "
            f"and {sum(gpus)} GPU, it has {node.cpus} CPU and {node.devices} GPU, which others use; free in all of Ray "
            f"now: {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU; {ADVICE}"
        )
    return [ActorSlot(node, n, group, bundle) for bundle, n in enumerate(gpus)]
