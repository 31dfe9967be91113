"""Decides whether a forward pass along a tree pays, from how much it has to compute and how fast each part of it is.

The rates were measured once (benchmarks/tree.py) and are constants: a choice by the clock would make two runs of one
seed differ in their last bits. Only their ratios matter, and the choice is not close to where they would: sharing that
pays at all mostly pays many times.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.tree.pieces import Pieces

ATTENTION_COST = 3.0
"""An attention operation in operations of a linear layer: 75 by 235 GFLOP/s on a core with AVX-512."""
CALL_COST = 1.5e7
"""One more attention call of a layer, there and back, in the same: some 60 us."""
MARGIN = 0.9
"""A tree must be this much cheaper: the estimate's own error must not cost anything. Rows of 30 to 125 tokens that
share nothing seem 6% cheaper without padding, and with 0.4M parameters took up to 15% longer."""
LEAST_SHARED = 0.05
"""Share of the rows' tokens that a tree must save. Without it a tree saves padding alone, and 32 rows of up to 400
tokens took as long as padded ones, or 10% longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the work for a token depends on."""

    linear_parameters: int
    """Weights that a token is multiplied with, the head aside: it is the same work either way."""
    num_layers: int
    attention_width: int
    """Query heads times their size."""

    def cost(self, *, tokens: float, pairs: float, calls: float) -> float:
        """Of one pass and its backward: 6 operations per weight, and 14 per pair and unit of width."""
        linear = 6.0 * self.linear_parameters * (tokens + PASS_OVERHEAD_TOKENS)
        return linear + self.num_layers * (14.0 * self.attention_width * ATTENTION_COST * pairs + CALL_COST * calls)

    def cost_of_tree(self, num_tokens: int, pieces: Pieces) -> float:
        """Of a pass along a tree."""
        return self.cost(tokens=num_tokens, pairs=pieces.num_pairs, calls=pieces.num_calls)

    def least_cost_of_tree(self, lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> float:
        """No tree of sorted rows costs less: each node and each visible pair once, in one call.

        `shared[i]` is what row i has in common with row i - 1. A node at depth d sees d + 1 nodes.
        """
        pairs = lengths * (lengths + 1) - shared * (shared + 1)
        return self.cost(tokens=int((lengths - shared).sum()), pairs=int(pairs.sum()) / 2, calls=1)

    def cost_of_rows(self, lengths: NDArray[np.int64]) -> float:
        """Of a pass over rows of these lengths, padded."""
        padded, longest = len(lengths) * int(lengths.max()), int(lengths.max())
        return self.cost(tokens=padded, pairs=padded * longest / 2, calls=1)


def shares_enough(lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> bool:
    """Whether sorted rows have so much in common that more than their padding is at stake.

    >>> shares_enough(np.array([90, 100]), np.array([0, 20])), shares_enough(np.array([90, 100]), np.array([0, 2]))
    (True, False)
    """
    return bool(shared.sum() >= LEAST_SHARED * lengths.sum())


def pays(tree: float, rows: float) -> bool:
    """Whether a pass along a tree, at that cost, is to be preferred.

    >>> pays(tree=9e8, rows=3e9), pays(tree=9.9e8, rows=1e9)
    (True, False)
    """
    return tree <= MARGIN * rows
