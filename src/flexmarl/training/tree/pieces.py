"""Decides the attention calls of a tree: each pair of a node and an ancestor is in one of them, and they are few.

A chain is a path that always goes to the largest child; it is a range of nodes. A node's ancestors are prefixes of a
few chains (at most log2 T). The nodes that see a prefix of a chain, besides the chain itself, are ranges of nodes too:

    chain  ├─────────────┬───────────┤          own      the chain sees itself, causally
                         └ side subtrees ┤      side     all their nodes see the chain up to the fork: no mask

Subtrees of few nodes see themselves under a mask that neighbours share, so that a bushy tree does not make many tiny
calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexmarl.training.tree.merge import PrefixTree

TILE = 64
"""Most nodes under one mask. A node computes at most this many pairs that it does not see, which is 4% of the work of
the linear layers in a model of width 256. Half as many nodes would make twice the calls."""


@dataclass(frozen=True, slots=True)
class Chains:
    """`count` chains of `length` nodes each, one after the other from `start` on. Each sees itself, causally."""

    start: int
    length: int
    count: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs that are computed, approximately."""
        return self.count * self.length * (self.length + 1) // 2


@dataclass(frozen=True, slots=True)
class Tile:
    """Whole subtrees of few nodes, which see themselves under a mask."""

    start: int
    stop: int
    visible: NDArray[np.bool_]
    """[stop - start, stop - start] True if the row's node sees the column's node."""

    @property
    def num_pairs(self) -> int:
        """Number of pairs that are computed, including those that the mask hides."""
        return (self.stop - self.start) ** 2


@dataclass(frozen=True, slots=True)
class Side:
    """Nodes `start` to `stop`, all of which see the nodes `seen_start` to `seen_stop`."""

    start: int
    stop: int
    seen_start: int
    seen_stop: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs that are computed."""
        return (self.stop - self.start) * (self.seen_stop - self.seen_start)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The attention calls of a tree. One call of `own` and any number of `sides` cover what a node sees."""

    own: tuple[Chains | Tile, ...]
    """Calls of nodes that see themselves; each node is in exactly one."""
    sides: tuple[Side, ...]

    @property
    def num_pairs(self) -> int:
        """Number of pairs that are computed."""
        return sum(piece.num_pairs for piece in (*self.own, *self.sides))

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return len(self.own) + len(self.sides)


def attention_pieces(tree: PrefixTree, tile: int = TILE) -> Pieces:
    """The attention calls of a tree, with at most `tile` nodes under one mask.

    >>> from flexmarl.training.tree.merge import merge
    >>> attention_pieces(merge([np.arange(200), np.arange(300)], [1, 1]))
    Pieces(own=(Chains(start=0, length=300, count=1),), sides=())
    """
    units: list[_Unit] = []
    sides: list[Side] = []
    starts, stops, below = (array.tolist() for array in (tree.starts, tree.stops, tree.subtree_stops))
    head = 0
    for segment in range(len(starts)):
        if stops[segment] < below[segment]:
            continue
        leaf = segment  # the chain of `head` ends here, and the next segment begins another
        if not units or units[-1].stop <= starts[head]:
            if below[head] - starts[head] <= tile:
                units.append(_Unit(starts[head], below[head], is_chain=leaf == head or below[head] == stops[leaf]))
            else:
                units.append(_Unit(starts[head], stops[leaf], is_chain=True))
                sides += [
                    Side(below[s + 1], below[s], starts[head], stops[s])
                    for s in range(head, leaf)
                    if below[s + 1] < below[s]
                ]
        head = segment + 1
    return Pieces(tuple(_own(units, tree.ends, tile)), tuple(sides))


class _Unit(NamedTuple):
    """Nodes that see themselves in one call."""

    start: int
    stop: int
    is_chain: bool


def _own(units: Sequence[_Unit], ends: NDArray[np.int64], tile: int) -> Iterator[Chains | Tile]:
    """Calls of the units: one per run of equal chains, one mask for small neighbours, one call for any other unit."""
    together: list[_Unit] = []
    for _, group in groupby(units, key=lambda unit: (unit.is_chain, unit.stop - unit.start)):
        run = list(group)
        start, stop = run[0].start, run[-1].stop
        if run[0].is_chain and stop - start > tile:
            yield from _tiles(together, ends, tile)
            together = []
            yield Chains(start, run[0].stop - start, len(run))
        else:
            together += run
    yield from _tiles(together, ends, tile)


def _tiles(units: Sequence[_Unit], ends: NDArray[np.int64], tile: int) -> Iterator[Chains | Tile]:
    while units:
        count = sum(unit.stop - units[0].start <= tile for unit in units)
        together, units = units[:count], units[count:]
        first, last = together[0], together[-1]
        if count == 1 and first.is_chain:
            yield Chains(first.start, first.stop - first.start, 1)
        else:
            yield Tile(first.start, last.stop, _visible(together, ends))


def _visible(units: Sequence[_Unit], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Attention mask inside each unit. `sides` cover what a unit sees of the chains above it."""
    start, stop = units[0].start, units[-1].stop
    nodes = np.arange(start, stop)
    number = np.repeat(np.arange(len(units)), [unit.stop - unit.start for unit in units])
    return (nodes <= nodes[:, None]) & (nodes[:, None] < ends[start:stop]) & (number == number[:, None])
