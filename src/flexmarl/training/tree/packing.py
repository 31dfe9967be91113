"""Decides which rows make one tree: subtrees stay together, and a cut costs its depth again."""

import numpy as np
from numpy.typing import NDArray

from flexmarl.training.batching import PASS_OVERHEAD_TOKENS


def cut(
    lengths: NDArray[np.int64], shared: NDArray[np.int64], max_tokens: int, overhead: float = PASS_OVERHEAD_TOKENS
) -> list[slice]:
    """Cuts sorted rows into trees of at most `max_tokens` nodes; a longer row is a tree of its own.

    `shared[i]` is what row i has in common with row i - 1. Rows that lie next to each other are merged, so a tree has
    the nodes of its first row and what every other one adds. Of all cuts, one with the least (nodes + `overhead` of
    each pass), by dynamic programming; the earliest of equals.

    >>> cut(np.array([90, 100, 80, 95]), np.array([0, 70, 10, 60]), max_tokens=130)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    added = np.cumsum(lengths - shared)
    if len(added) and added[-1] + shared[0] <= max_tokens:
        return [slice(0, len(lengths))]  # Any cut would compute a path and start a pass once more.
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
