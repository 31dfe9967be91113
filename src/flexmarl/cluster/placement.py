"""Decides which node each resident gets: those of one policy spread over nodes, and all residents or none get room.

A resident takes one CPU and its devices, all on one node. Its pool says which nodes it may be on, and how many devices
of each node the pool may take. Equal clusters and equal requests give equal places: nodes are tried in order of name.
"""

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

    Those with most devices choose first, so that small ones do not break up the room of large ones. Each takes the node
    with the fewest residents of its kind and policy, then with the fewest residents, then the first by name.

    >>> nodes = [ClusterNode(name=name, id=name, address=name, cpus=2, devices=0) for name in "ab"]
    >>> requests = [RoomRequest(name=WorkerId("engine", "solver", n), devices=0, pool="all") for n in range(2)]
    >>> [placed.node for placed in place(requests, nodes=nodes, pools={"all": PoolNodes(nodes=frozenset("ab"))})]
    ['a', 'b']
    """
    by_name = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
    taken = {name: [placed.request for placed in held if placed.node == name] for name in by_name}
    found: dict[int, Placed] = {}
    for index in sorted(range(len(requests)), key=lambda index: -requests[index].devices):
        request = requests[index]
        allowed = [node for node in by_name.values() if _allows(pools[request.pool], request, node)]
        free = [node for node in allowed if _fits(request, node, pools[request.pool], taken[node.name])]
        if not free:
            return NoRoom(_shortage(request, allowed, taken))
        best = min(free, key=lambda node: (_alike(request, taken[node.name]), len(taken[node.name]), node.name))
        found[index] = Placed(request=request, node=best.name, because=_reason(request, best, free, taken))
        taken[best.name].append(request)
    return [found[index] for index in range(len(requests))]


def _allows(pool: PoolNodes, request: RoomRequest, node: ClusterNode) -> bool:
    return node.name == request.node if request.node is not None else node.name in pool.nodes


def _fits(request: RoomRequest, node: ClusterNode, pool: PoolNodes, there: Sequence[RoomRequest]) -> bool:
    if len(there) >= node.cpus or sum(one.devices for one in there) + request.devices > node.devices:
        return False
    of_pool = sum(one.devices for one in there if one.pool == request.pool) + request.devices
    return pool.devices is None or not request.devices or of_pool <= pool.devices


def _alike(request: RoomRequest, there: Sequence[RoomRequest]) -> int:
    return sum((one.name.kind, one.name.policy) == (request.name.kind, request.name.policy) for one in there)


def _reason(
    request: RoomRequest, node: ClusterNode, free: Sequence[ClusterNode], taken: Mapping[str, Sequence[RoomRequest]]
) -> str:
    if request.node is not None:
        return "it was asked for"
    if len(free) == 1:
        return "no other node has room"
    alike, load = _alike(request, taken[node.name]), len(taken[node.name])
    more_alike = all(_alike(request, taken[one.name]) > alike for one in free if one is not node)
    what = f"{alike} others of its policy" if more_alike else f"{alike} of its policy and {load} residents in all"
    return f"it has {what}, the fewest of {len(free)} nodes"


def _shortage(request: RoomRequest, allowed: Sequence[ClusterNode], taken: Mapping[str, Sequence[RoomRequest]]) -> str:
    has = "; ".join(
        f"{node.name} has {node.cpus} CPU and {node.devices} GPU, of which {len(taken[node.name])} CPU and "
        f"{sum(one.devices for one in taken[node.name])} GPU are taken"
        for node in allowed
    )
    return f"{request.name} needs 1 CPU and {request.devices} GPU on one node; {has or 'no node is allowed to have it'}"
