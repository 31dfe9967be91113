"""Decides how rows become prefix trees: each distinct (prefix, token) once, in depth-first order.

    rows        a b c d          segments   [a b]──[c]──[d]     tokens    a b c d e f
                a b c                          └───[e f]        depths    0 1 2 3 2 3
                a b e f                                         ends      6 6 4 4 6 6

`merge` makes one tree. It sorts the rows. Two sorted rows share what all neighbours between them share, so the tree
grows by one branch per row. A segment is a stretch of tokens without a fork; where a row ends and a longer one
continues, a new segment begins too.

`cut` decides which rows make one tree. A cut repeats the prefix that it crosses, so subtrees stay together.

`side_by_side` puts trees into one pass without merging them: equal tokens of two of them stay two nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexmarl.records import IntArray
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows merged into a tree. Nodes are tokens, numbered in depth-first order, so a subtree is a range of nodes."""

    tokens: Indices
    """[T] token ids."""
    depths: Indices
    """[T] number of tokens before each node in its rows: its position."""
    starts: Indices
    """[S] first node of each segment, ascending. Segments are in depth-first order, too."""
    stops: Indices
    """[S] number after each segment's last node."""
    subtree_stops: Indices
    """[S] number after the last node of each segment's subtree. A segment's largest child follows it directly."""
    predictors: Indices
    """[N] node that predicts each label, row after row, in the order of the rows that were merged."""

    @property
    def num_tokens(self) -> int:
        """Number of nodes."""
        return len(self.tokens)

    @property
    def ends(self) -> Indices:
        """[T] number after the last node of each node's subtree. Node q sees node k if and only if k <= q < ends[k]."""
        return np.repeat(self.subtree_stops, self.stops - self.starts)


def sort_rows(rows: Sequence[IntArray]) -> tuple[Indices, Indices]:
    """Row numbers in lexicographic order, and the number of tokens that each row shares with the one before.

    A prefix comes before the rows that extend it.

    >>> [a.tolist() for a in sort_rows([np.array([1, 2, 9]), np.array([1]), np.array([1, 2, 4])])]
    [[1, 2, 0], [0, 1, 2]]
    """
    keys = [row.astype(">u4").tobytes() for row in rows]  # big-endian: bytes compare as the numbers do
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = [0] * min(len(rows), 1)
    shared += [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    return np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64)


def merge(rows: Sequence[IntArray], num_labels: Sequence[int]) -> PrefixTree:
    """The tree of the rows, none of which is empty. The last `num_labels[i]` tokens of row i predict one label each.

    A row does not contain its last label, since a token that predicts nothing need not be computed.

    >>> tree = merge([np.array([7, 8, 9]), np.array([7, 8]), np.array([7, 5])], [1, 1, 2])
    >>> tree.tokens.tolist(), tree.depths.tolist(), tree.predictors.tolist()
    ([7, 8, 9, 5], [0, 1, 2, 1], [2, 1, 0, 3])
    """
    order, shared = sort_rows(rows)
    branches = _Branches([rows[i] for i in order])
    for rank, common in enumerate(shared.tolist()):
        branches.add(rank, common)
    return branches.numbered(order.argsort(), num_labels)


def side_by_side(trees: Sequence[PrefixTree]) -> PrefixTree:
    """One forest of the trees, whose nodes follow one another. No node sees one of another tree.

    >>> both = side_by_side([merge([np.array([7, 8])], [1]), merge([np.array([7, 9])], [2])])
    >>> both.tokens.tolist(), both.depths.tolist(), both.predictors.tolist()
    ([7, 8, 7, 9], [0, 1, 0, 1], [1, 2, 3])
    """
    offsets = np.cumsum([0, *(tree.num_tokens for tree in trees[:-1])])
    placed = list(zip(trees, offsets, strict=True))
    return PrefixTree(
        tokens=np.concatenate([tree.tokens for tree in trees]),
        depths=np.concatenate([tree.depths for tree in trees]),
        starts=np.concatenate([tree.starts + offset for tree, offset in placed]),
        stops=np.concatenate([tree.stops + offset for tree, offset in placed]),
        subtree_stops=np.concatenate([tree.subtree_stops + offset for tree, offset in placed]),
        predictors=np.concatenate([tree.predictors + offset for tree, offset in placed]),
    )


def _common(first: IntArray, second: IntArray) -> int:
    shorter = min(len(first), len(second))
    differs = first[:shorter] != second[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


class _Branches:
    """The segments while sorted rows are added. They are parallel lists, since a fork cuts a segment in two."""

    def __init__(self, rows: Sequence[IntArray]) -> None:
        self._rows = rows
        self._begins: list[int] = []
        """Depth of each segment's first token. `_ends` is the depth after its last token."""
        self._ends: list[int] = []
        self._ranks: list[int] = []
        """Rank of a row that holds each segment's tokens."""
        self._parents: list[int] = []
        self._path: list[int] = []
        """Segments from the root to the end of the latest row."""
        self._leaves: list[int] = []
        """Segment in which each row ends."""

    def add(self, rank: int, shared: int) -> None:
        """Adds the next row, which shares `shared` tokens with the one before."""
        path, length = self._path, len(self._rows[rank])
        while path and self._begins[path[-1]] >= shared:
            path.pop()
        if path and self._ends[path[-1]] > shared:
            lower = path.pop()
            path.append(self._new(self._begins[lower], shared, self._ranks[lower], self._parents[lower]))
            self._begins[lower], self._parents[lower] = shared, path[-1]
        if length > shared:
            path.append(self._new(shared, length, rank, path[-1] if path else -1))
        self._leaves.append(path[-1])

    def numbered(self, ranks: Indices, num_labels: Sequence[int]) -> PrefixTree:
        """The tree with numbered nodes. Row i has rank `ranks[i]`."""
        order, sizes = self._depth_first()
        begins, ends = np.array(self._begins)[order], np.array(self._ends)[order]
        stops = np.cumsum(ends - begins)
        starts = stops - (ends - begins)
        first_nodes = np.empty(len(order), dtype=np.int64)
        first_nodes[order] = starts
        spans = list(zip(order, begins.tolist(), ends.tolist(), strict=True))
        return PrefixTree(
            tokens=np.concatenate([self._rows[self._ranks[s]][a:b] for s, a, b in spans]).astype(np.int64),
            depths=np.concatenate([np.arange(a, b) for _, a, b in spans]),
            starts=starts,
            stops=stops,
            subtree_stops=starts + np.array(sizes)[order],
            predictors=np.concatenate(
                [self._last_nodes(rank, n, first_nodes) for rank, n in zip(ranks.tolist(), num_labels, strict=True)]
            ),
        )

    def _new(self, begin: int, end: int, rank: int, parent: int) -> int:
        self._begins.append(begin)
        self._ends.append(end)
        self._ranks.append(rank)
        self._parents.append(parent)
        return len(self._begins) - 1

    def _depth_first(self) -> tuple[list[int], list[int]]:
        """Segments in order, and the size of each one's subtree. The largest child is first: long paths stay ranges."""
        sizes = [end - begin for begin, end in zip(self._begins, self._ends, strict=True)]
        children: list[list[int]] = [[] for _ in range(len(sizes) + 1)]  # the last list: segments without a parent
        for segment in sorted(range(len(sizes)), key=self._begins.__getitem__, reverse=True):
            parent = self._parents[segment]
            children[parent].append(segment)
            if parent >= 0:
                sizes[parent] += sizes[segment]
        order, waiting = [], [-1]
        while waiting:
            segment = waiting.pop()
            if segment >= 0:
                order.append(segment)
            # Equal sizes are ordered by content, so that the order of the rows does not matter.
            waiting += sorted(children[segment], key=lambda child: (sizes[child], -self._ranks[child]))
        return order, sizes

    def _last_nodes(self, rank: int, count: int, first_nodes: Indices) -> Indices:
        """The last `count` nodes of a row, found from its end upwards."""
        stop = len(self._rows[rank])
        first, segment = stop - count, self._leaves[rank]
        nodes = np.empty(count, dtype=np.int64)
        while stop > first:
            begin = self._begins[segment]
            top = max(begin, first)
            nodes[top - first : stop - first] = np.arange(top, stop) - begin + first_nodes[segment]
            segment, stop = self._parents[segment], top
        return nodes


def cut(
    lengths: NDArray[np.int64], shared: NDArray[np.int64], max_tokens: int, overhead: float = PASS_OVERHEAD_TOKENS
) -> list[slice]:
    """Cuts sorted rows into trees of at most `max_tokens` nodes; a longer row is a tree of its own.

    `shared[i]` is the number of tokens that row i shares with row i - 1. A tree merges neighbouring rows, so it has the
    nodes of its first row and those that every other row adds. Dynamic programming finds a cut with the least (nodes +
    `overhead` of each pass), and the earliest among equals.

    >>> cut(np.array([90, 100, 80, 95]), np.array([0, 70, 10, 60]), max_tokens=130)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    added = np.cumsum(lengths - shared)
    if len(added) and added[-1] + shared[0] <= max_tokens:
        return [slice(0, len(lengths))]  # Any cut would repeat a path and start one more pass.
    best = np.zeros(len(lengths) + 1)
    first = np.zeros(len(lengths), dtype=np.int64)
    for last in range(len(lengths)):
        nodes = added[last] - added[: last + 1] + lengths[: last + 1]
        costs = best[: last + 1] + np.where(nodes <= max_tokens, nodes, np.inf)
        costs[last] = best[last] + nodes[last]
        first[last] = costs.argmin()
        best[last + 1] = costs[first[last]] + overhead
    cuts, end = [], len(lengths)
    while end:
        cuts.append(slice(int(first[end - 1]), end))
        end = int(first[end - 1])
    return cuts[::-1]
