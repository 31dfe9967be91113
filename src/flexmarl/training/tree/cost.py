"""Decides whether a forward pass along a tree pays, from how much it has to compute and how fast each part of it is.

The rates are constants of the kind of device: a choice by the clock would make two runs of one seed differ in their
last bits. Only their ratios matter, and the choice is not close to where they would: sharing that pays at all mostly
pays many times. A CPU's were measured once (benchmarks/tree.py). CUDA's are derived from what an H100 is known to do,
and no GPU has checked them; benchmarks/gpu/run.py measures what they should be.

Decides what trees saved, as figures of a micro-batch and of an update.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexmarl.records import LossReport
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.tree.flex import BLOCK, padded_ends, visible_blocks
from flexmarl.training.tree.merge import PrefixTree
from flexmarl.training.tree.pieces import attention_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a kind of device is at each part, in operations of a linear layer."""

    attention: float
    """An attention operation."""
    call: float = 0.0
    """One more attention call of a layer, there and back."""
    layer: float = 0.0
    """Least that a layer of a pass takes, there and back: its kernels must be started, however little they do."""
    tree: float = 0.0
    """What a pass along a tree costs in addition."""


RATES: Mapping[str, Rates] = {
    # Attention 75, linear layers 235 GFLOP/s on a core with AVX-512; a call some 60 us.
    "cpu": Rates(attention=3.0, call=1.5e7),
    # Products at 400 TFLOP/s in bfloat16, attention in blocks at half of it. A layer there and back is some 80 kernels
    # of 5 us: 0.4 ms, which is what 1 800 tokens of a model of 0.5B parameters take; below that a tree saves nothing.
    # The block mask is made on the host: 1.5 ms.
    "cuda": Rates(attention=2.0, layer=1.6e11, tree=6e11),
}
"""By the type of device."""
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
    device: str = "cpu"
    """Type of the device that it is on: a key of RATES."""

    @property
    def rates(self) -> Rates:
        """Of its device."""
        return RATES[self.device]

    @property
    def overhead_tokens(self) -> float:
        """What one more pass costs, in tokens: where a pass takes a least time, as many as it could have had in it."""
        floor = self.rates.layer * self.num_layers
        return floor / (6.0 * self.linear_parameters) if floor else PASS_OVERHEAD_TOKENS

    def cost(self, *, tokens: float, pairs: float, calls: float) -> float:
        """Of one pass and its backward: 6 operations per weight, and 14 per pair and unit of width.

        A GPU computes while its next kernels are started, so a pass takes the longer of the two.
        """
        rates, floor = self.rates, self.rates.layer * self.num_layers
        linear = 6.0 * self.linear_parameters * (tokens if floor else tokens + PASS_OVERHEAD_TOKENS)
        attention = 14.0 * self.attention_width * rates.attention * pairs + rates.call * calls
        return max(floor, linear + self.num_layers * attention)

    def cost_of_tree(self, tree: PrefixTree) -> float:
        """Of a pass along a tree: a CPU goes piece by piece, a GPU by whole blocks."""
        if self.device == "cpu":
            pieces = attention_pieces(tree)
            return self.cost(tokens=tree.num_tokens, pairs=pieces.num_pairs, calls=pieces.num_calls)
        ends = padded_ends(tree.ends, BLOCK)
        blocks = sum(int(part.sum()) for part in visible_blocks(ends, BLOCK))
        return self.rates.tree + self.cost(tokens=len(ends), pairs=blocks * BLOCK**2, calls=1)

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


ROW_TOKENS, SAVED = "row_tokens", "tokens_saved"
"""Sums of a LossReport: tokens of all rows, were each computed alone, and how many of them were shared."""


def tree_figures(reports: Iterable[LossReport]) -> dict[str, float]:
    """`tokens_saved`, and `tree_token_ratio`: tokens of rows over tokens computed, 1 where nothing was shared.

    >>> sums = {"row_tokens": 40.0, "tokens_saved": 30.0}
    >>> tree_figures([LossReport(micro_batch_id="m", num_samples=2, num_tokens=3.0, sums=sums)])
    {'tokens_saved': 30.0, 'tree_token_ratio': 4.0}
    """
    sums = [report.sums for report in reports]
    tokens, saved = (float(sum(each.get(name, 0.0) for each in sums)) for name in (ROW_TOKENS, SAVED))
    return {SAVED: saved, "tree_token_ratio": tokens / (tokens - saved)} if tokens else {}
