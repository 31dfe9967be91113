"""Decides which rank computes which rows of a micro-batch, where several ranks train one policy.

    rows   a b c d      sorted and cut     [a b c d, a b c e]  6 tokens     rank 0
           x y                             [m n o p q r]       6 tokens     rank 1
           a b c e                         [x y]               2 tokens     rank 0
           m n o p q r

Rows that share most of their tokens are one tree, which no rank gets a part of: a cut would compute its prefix on both
sides. Trees go one after the other, the largest first, to the rank that has least so far. The longest rank then has at
most 4/3 of what the best split would give it (Graham 1969, "Bounds on multiprocessing timing anomalies").
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexmarl.records import IntArray
from flexmarl.training.tree.merge import sort_rows

SHARES_MOST = 0.5
"""A row is tied to the one before if they share more than this part of its tokens. So a cut between trees repeats at
most half of a row, and a system prompt that all rows begin with does not make them one tree."""


def partition(rows: Sequence[IntArray], names: Sequence[str], ranks: int) -> list[list[int]]:
    """Numbers of the rows that each of `ranks` ranks computes, ascending. Every row is in one list; lists may be empty.

    `names` of the rows are distinct. The same rows have the same split, whatever order they come in.

    >>> row = np.arange(6)
    >>> partition([row, np.arange(9, 13), np.append(row, 7)], ["a", "b", "c"], ranks=2)
    [[0, 2], [1]]
    """
    by_name = sorted(range(len(rows)), key=names.__getitem__)
    order, shared = sort_rows([rows[number] for number in by_name])
    lengths = np.array([len(rows[by_name[number]]) for number in order], dtype=np.int64)
    trees = trees_of(lengths, shared)
    costs = [int((lengths[tree] - shared[tree]).sum() + shared[tree.start]) for tree in trees]
    split: list[list[int]] = [[] for _ in range(ranks)]
    for tree, rank in zip(trees, _ranks_of(costs, ranks), strict=True):
        split[rank] += [by_name[number] for number in order[tree]]
    return [sorted(of_rank) for of_rank in split]


def trees_of(lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> list[slice]:
    """The trees of sorted rows: `shared[i]` of the `lengths[i]` tokens of row i are those of row i - 1 too.

    >>> trees_of(np.array([10, 10, 8]), np.array([0, 9, 3]))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    begins = np.flatnonzero(shared <= SHARES_MOST * lengths).tolist()
    return [slice(begin, end) for begin, end in pairwise([*begins, len(lengths)])]


def _ranks_of(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tree."""
    load, found = [0] * ranks, [0] * len(costs)
    for tree in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        found[tree] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[found[tree]] += costs[tree]
    return found
