"""Decides which node each resident gets: those of one policy spread over nodes, and all residents or none get room.

A resident takes a room of one CPU and its devices, all on one node, which is that of its group, if it is in one. Its
pool says which nodes it may be on, and how many devices of each node the pool may take. Two residents of different
pools that take turns share one room (mode `colocated`: an engine, and a rank of a training place), so such pools need
the larger of two numbers, not their sum. Equal clusters and equal requests give equal places: nodes are tried in order
of name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count

from flexmarl.cluster.interface import ClusterNode
from flexmarl.records import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRequest:
    """The room that one resident needs."""

    name: WorkerId
    devices: int
    """Accelerators, all of them on one node."""
    pool: str
    """Residents of one pool share its devices."""
    node: str | None = None
    """The only node that is allowed; None allows all nodes of the pool."""
    group: str = ""
    """Requests of one group get rooms on one node; "" is none."""
    takes_turns: bool = False
    """True if it holds its devices in turn with a resident of another pool, which then has the same room."""

    def may_share_with(self, other: "RoomRequest") -> bool:
        """True if one room is enough for both."""
        both = self.takes_turns and other.takes_turns
        return both and self.pool != other.pool and self.devices == other.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodes:
    """The part of a cluster that one pool may use."""

    nodes: frozenset[str]
    devices: int | None = None
    """Most accelerators of each node; None means all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The node of one resident, and why it is this one."""

    request: RoomRequest
    node: str
    room: int
    """Number of its room on the node. Two residents that take turns have the same one, and no others."""
    because: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The verdict that the requests cannot all be met."""

    because: str
    """The need of the first resident without room; and all that each node of its pool has and has given away."""


def place(
    requests: Sequence[RoomRequest],
    *,
    nodes: Iterable[ClusterNode],
    pools: Mapping[str, PoolNodes],
    held: Iterable[Placed] = (),
) -> list[Placed] | NoRoom:
    """Places residents, given those that are `held` already. Returns a place for each request, in their order.

    Those that may be on one node only choose first, then those with most devices, so that small ones do not break up
    the room of large ones; those of one group choose as one, and large groups before small ones. One that takes turns
    shares a room if it can. Any other takes the node with the fewest residents of its kind and policy, then with the
    fewest residents, then the first by name.

    >>> nodes = [ClusterNode(name=name, id=name, address=name, cpus=2, devices=0) for name in "ab"]
    >>> requests = [RoomRequest(name=WorkerId("engine", "solver", n), devices=0, pool="all") for n in range(2)]
    >>> [placed.node for placed in place(requests, nodes=nodes, pools={"all": PoolNodes(nodes=frozenset("ab"))})]
    ['a', 'b']
    """
    ordered = sorted(nodes, key=lambda node: node.name)
    taken = {node.name: _Taken() for node in ordered}
    for placed in held:
        if placed.node in taken:
            taken[placed.node].add(placed.request, placed.room)
    found: dict[int, Placed] = {}
    for unit in sorted(_units(requests), key=lambda unit: _urgency([requests[index] for index in unit])):
        asked = [requests[index] for index in unit]
        first, pool = asked[0], pools[asked[0].pool]
        allowed = [node for node in ordered if _allows(pool, first, node)]
        free = [node for node in allowed if _all_fit(asked, node, pool, taken[node.name])]
        if not free:
            return NoRoom(_shortage(asked, allowed, taken))
        best = min(free, key=lambda node: _preference(first, taken[node.name], node))
        there, because = taken[best.name], _reason(first, best, free, taken)
        for index, request in zip(unit, asked, strict=True):
            room = there.room_for(request)
            found[index] = Placed(request=request, node=best.name, room=room, because=because)
            there.add(request, room)
    return [found[index] for index in range(len(requests))]


def needed(requests: Iterable[RoomRequest]) -> tuple[int, int]:
    """The CPUs and the accelerators that residents need on one node, where those that take turns share rooms.

    >>> engines = [RoomRequest(name=WorkerId("engine", "solver", n), devices=1, pool="rollout") for n in range(3)]
    >>> needed(engines)
    (3, 3)
    """
    rooms: Counter[int] = Counter()
    in_turn: dict[int, Counter[str]] = {}
    for request in requests:
        if request.takes_turns:
            in_turn.setdefault(request.devices, Counter())[request.pool] += 1
        else:
            rooms[request.devices] += 1
    for devices, of_pool in in_turn.items():
        rooms[devices] += max(of_pool.values())
    return rooms.total(), sum(devices * number for devices, number in rooms.items())


def spare_cores(cores: int, threads: Sequence[int]) -> int:
    """Residents for which a machine has cores beside residents with so many `threads` each.

    They have as many threads as the one with most.

    >>> spare_cores(8, [1, 1, 2])
    2
    """
    return max(0, cores - sum(threads)) // max(threads)


def _units(requests: Sequence[RoomRequest]) -> list[list[int]]:
    """The numbers of the requests that one node must meet: of each group, and of each that is in none."""
    units: dict[str | int, list[int]] = {}
    for number, request in enumerate(requests):
        units.setdefault(request.group or number, []).append(number)
    return [*units.values()]


def _urgency(unit: Sequence[RoomRequest]) -> tuple[bool, int, int]:
    return unit[0].node is None, -sum(request.devices for request in unit), -len(unit)


class _Taken:
    """The room of one node that is given away."""

    def __init__(self) -> None:
        self.residents = self.devices = 0
        self.of_pool: Counter[str] = Counter()
        """Devices by pool."""
        self.rooms: dict[int, list[RoomRequest]] = {}
        """The residents in each room: one, or two that take turns."""
        self._kinds: Counter[tuple[str, str]] = Counter()

    def add(self, request: RoomRequest, room: int) -> None:
        self.residents += 1
        self.devices += request.devices if room not in self.rooms else 0
        self.of_pool[request.pool] += request.devices
        self.rooms.setdefault(room, []).append(request)
        self._kinds[request.name.kind, request.name.policy] += 1

    def alike(self, request: RoomRequest) -> int:
        """Residents of the same kind and policy."""
        return self._kinds[request.name.kind, request.name.policy]

    def shared_by(self, request: RoomRequest) -> int | None:
        """The first room in which one resident takes turns with this one; None if there is none."""
        alone = (number for number, inside in sorted(self.rooms.items()) if len(inside) == 1)
        return next((number for number in alone if self.rooms[number][0].may_share_with(request)), None)

    def room_for(self, request: RoomRequest) -> int:
        """The room that the resident gets: one to share, or the first number that nobody has."""
        shared = self.shared_by(request)
        return next(number for number in count() if number not in self.rooms) if shared is None else shared


def _allows(pool: PoolNodes, request: RoomRequest, node: ClusterNode) -> bool:
    return node.name == request.node if request.node is not None else node.name in pool.nodes


def _preference(request: RoomRequest, there: _Taken, node: ClusterNode) -> tuple[bool, int, int, str]:
    return there.shared_by(request) is None, there.alike(request), there.residents, node.name


def _fits(request: RoomRequest, node: ClusterNode, pool: PoolNodes, there: _Taken) -> bool:
    full = len(there.rooms) >= node.cpus or there.devices + request.devices > node.devices
    if full and there.shared_by(request) is None:
        return False
    return pool.devices is None or not request.devices or there.of_pool[request.pool] + request.devices <= pool.devices


def _all_fit(unit: Sequence[RoomRequest], node: ClusterNode, pool: PoolNodes, there: _Taken) -> bool:
    if len(unit) == 1:
        return _fits(unit[0], node, pool, there)
    there = deepcopy(there)
    for request in unit:
        if not _fits(request, node, pool, there):
            return False
        there.add(request, there.room_for(request))
    return True


def _reason(request: RoomRequest, node: ClusterNode, free: Sequence[ClusterNode], taken: Mapping[str, _Taken]) -> str:
    if request.node is not None:
        return "it was asked for"
    if (shared := taken[node.name].shared_by(request)) is not None:
        return f"it takes turns with {taken[node.name].rooms[shared][0].name} there"
    if len(free) == 1:
        return "no other node has room"
    alike, load = taken[node.name].alike(request), taken[node.name].residents
    others_have_more = all(taken[one.name].alike(request) > alike for one in free if one is not node)
    what = f"{alike} others of its policy" if others_have_more else f"{alike} of its policy and {load} residents in all"
    return f"it has {what}, the fewest of {len(free)} nodes"


def _shortage(unit: Sequence[RoomRequest], allowed: Sequence[ClusterNode], taken: Mapping[str, _Taken]) -> str:
    has = "; ".join(
        f"{node.name} has {node.cpus} CPU and {node.devices} GPU, of which {len(taken[node.name].rooms)} CPU and "
        f"{taken[node.name].devices} GPU are taken"
        for node in allowed
    )
    who = unit[0].name if len(unit) == 1 else f"{unit[0].name} with {len(unit) - 1} more of its group"
    needs = f"{who} needs {len(unit)} CPU and {sum(request.devices for request in unit)} GPU on one node"
    return f"{needs}; {has or 'no node is allowed to have it'}"
