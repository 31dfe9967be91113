"""Decides which node each resident gets: those of one policy spread over nodes, and all residents or none get room.

A resident takes one CPU and its devices, all on one node. Its pool says which nodes it may be on, and how many devices
of each node the pool may take. Equal clusters and equal requests give equal places: nodes are tried in order of name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    the room of large ones. Each takes the node with the fewest residents of its kind and policy, then with the fewest
    residents, then the first by name.

    >>> nodes = [ClusterNode(name=name, id=name, address=name, cpus=2, devices=0) for name in "ab"]
    >>> requests = [RoomRequest(name=WorkerId("engine", "solver", n), devices=0, pool="all") for n in range(2)]
    >>> [placed.node for placed in place(requests, nodes=nodes, pools={"all": PoolNodes(nodes=frozenset("ab"))})]
    ['a', 'b']
    """
    ordered = sorted(nodes, key=lambda node: node.name)
    taken = {node.name: _Taken() for node in ordered}
    for placed in held:
        if placed.node in taken:
            taken[placed.node].add(placed.request)
    found: dict[int, Placed] = {}
    for index in sorted(range(len(requests)), key=lambda index: _urgency(requests[index])):
        request = requests[index]
        pool = pools[request.pool]
        allowed = [node for node in ordered if _allows(pool, request, node)]
        free = [node for node in allowed if _fits(request, node, pool, taken[node.name])]
        if not free:
            return NoRoom(_shortage(request, allowed, taken))
        best = min(free, key=lambda node: (taken[node.name].alike(request), taken[node.name].residents, node.name))
        found[index] = Placed(request=request, node=best.name, because=_reason(request, best, free, taken))
        taken[best.name].add(request)
    return [found[index] for index in range(len(requests))]


def spare_cores(cores: int, threads: Sequence[int]) -> int:
    """Residents for which a machine has cores beside residents with so many `threads` each.

    They have as many threads as the one with most.

    >>> spare_cores(8, [1, 1, 2])
    2
    """
    return max(0, cores - sum(threads)) // max(threads)


def _urgency(request: RoomRequest) -> tuple[bool, int]:
    return request.node is None, -request.devices


class _Taken:
    """The room of one node that is given away."""

    def __init__(self) -> None:
        self.residents = self.devices = 0
        self.of_pool: Counter[str] = Counter()
        """Devices by pool."""
        self._kinds: Counter[tuple[str, str]] = Counter()

    def add(self, request: RoomRequest) -> None:
        self.residents += 1
        self.devices += request.devices
        self.of_pool[request.pool] += request.devices
        self._kinds[request.name.kind, request.name.policy] += 1

    def alike(self, request: RoomRequest) -> int:
        """Residents of the same kind and policy."""
        return self._kinds[request.name.kind, request.name.policy]


def _allows(pool: PoolNodes, request: RoomRequest, node: ClusterNode) -> bool:
    return node.name == request.node if request.node is not None else node.name in pool.nodes


def _fits(request: RoomRequest, node: ClusterNode, pool: PoolNodes, there: _Taken) -> bool:
    if there.residents >= node.cpus or there.devices + request.devices > node.devices:
        return False
    return pool.devices is None or not request.devices or there.of_pool[request.pool] + request.devices <= pool.devices


def _reason(request: RoomRequest, node: ClusterNode, free: Sequence[ClusterNode], taken: Mapping[str, _Taken]) -> str:
    if request.node is not None:
        return "it was asked for"
    if len(free) == 1:
        return "no other node has room"
    alike, load = taken[node.name].alike(request), taken[node.name].residents
    others_have_more = all(taken[one.name].alike(request) > alike for one in free if one is not node)
    what = f"{alike} others of its policy" if others_have_more else f"{alike} of its policy and {load} residents in all"
    return f"it has {what}, the fewest of {len(free)} nodes"


def _shortage(request: RoomRequest, allowed: Sequence[ClusterNode], taken: Mapping[str, _Taken]) -> str:
    has = "; ".join(
        f"{node.name} has {node.cpus} CPU and {node.devices} GPU, of which {taken[node.name].residents} CPU and "
        f"{taken[node.name].devices} GPU are taken"
        for node in allowed
    )
    return f"{request.name} needs 1 CPU and {request.devices} GPU on one node; {has or 'no node is allowed to have it'}"
