"""Decides whether a forward pass along a prefix tree pays, from the amount of each kind of work and its speed.

The rates are constants of the device type: a choice by the clock would make two runs of one seed differ in their last
bits. Only the ratios of rates matter, and the choice is rarely close: where sharing pays at all, it mostly pays many
times over. The CPU's were measured once (benchmarks/tree.py); CUDA's follow what benchmarks/gpu/run.py measured
on an H100, as far as it is not the processor of that machine.

`tree_figures` reports what trees saved in a micro-batch or an update.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexmarl.records import LossReport
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.tree.kernels import BLOCK, padded_ends, visible_blocks
from flexmarl.training.tree.merge import PrefixTree
from flexmarl.training.tree.pieces import attention_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Costs of a device type, in operations of a linear layer."""

    attention: float
    """Cost of an attention operation."""
    call: float = 0.0
    """Cost of one more attention call of a layer, forward and backward."""
    layer: float = 0.0
    """Least cost of a layer in a pass, forward and backward: its kernels must be started, however little they do."""
    tree: float = 0.0
    """Additional cost of a pass along a tree."""


RATES: Mapping[str, Rates] = {
    # On a core with AVX-512, attention does 75 GFLOP/s and linear layers 235; a call takes about 60 us.
    "cpu": Rates(attention=3.0, call=1.5e7),
    # Matrix products run at 750 TFLOP/s in bfloat16; attention in blocks is taken to be half as fast. The kernels of a
    # layer, forward, once more and backward, started in 6 to 9 ms, and a tree took 14 ms more, on a virtual machine
    # whose processor was the bound; here stand 2 and 7, since a tree that saves nothing costs little, and one that was
    # not taken may cost half of the step. 2 ms are the time of 16 000 tokens of a layer of 15M parameters.
    "cuda": Rates(attention=2.0, layer=1.5e12, tree=5e12),
}
"""Rates by device type."""
MARGIN = 0.9
"""Largest cost of a tree as a share of the rows' cost: the estimate has errors. Without padding, rows of 30 to 125
tokens that share nothing seem 6% cheaper; with 0.4M parameters they took up to 15% longer."""
LEAST_SHARED = 0.05
"""Share of the rows' tokens that a tree must save. A tree that saves only padding does not pay: 32 rows of up to 400
tokens took as long as padded ones, or 10% longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Properties of a model that the work for a token depends on."""

    linear_parameters: int
    """Weights that a token is multiplied with, without the head, whose work is the same either way."""
    num_layers: int
    attention_width: int
    """Number of query heads times their size."""
    device: str = "cpu"
    """Type of the device that the model is on: a key of RATES."""

    @property
    def rates(self) -> Rates:
        """Rates of its device."""
        return RATES[self.device]

    @property
    def overhead_tokens(self) -> float:
        """Cost of one more pass, in tokens. If a pass has a least time, it is the number of tokens that fit into it."""
        floor = self.rates.layer * self.num_layers
        return floor / (6.0 * self.linear_parameters) if floor else PASS_OVERHEAD_TOKENS

    def cost(self, *, tokens: float, pairs: float, calls: float) -> float:
        """Cost of one pass and its backward: 6 operations per token and weight, and 14 per pair and unit of width.

        A GPU computes while its next kernels are started, so a pass takes the longer of the two.
        """
        rates, floor = self.rates, self.rates.layer * self.num_layers
        linear = 6.0 * self.linear_parameters * (tokens if floor else tokens + PASS_OVERHEAD_TOKENS)
        attention = 14.0 * self.attention_width * rates.attention * pairs + rates.call * calls
        return max(floor, linear + self.num_layers * attention)

    def cost_of_tree(self, tree: PrefixTree) -> float:
        """Cost of a pass along a tree. A CPU computes it piece by piece, a GPU by whole blocks."""
        if self.device == "cpu":
            pieces = attention_pieces(tree)
            return self.cost(tokens=tree.num_tokens, pairs=pieces.num_pairs, calls=pieces.num_calls)
        ends = padded_ends(tree.ends, BLOCK)
        blocks = sum(int(part.sum()) for part in visible_blocks(ends, BLOCK))
        return self.rates.tree + self.cost(tokens=len(ends), pairs=blocks * BLOCK**2, calls=1)

    def least_cost_of_tree(self, lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> float:
        """Lower bound on the cost of any tree of sorted rows: each node and each visible pair once, in one call.

        `shared[i]` is the number of tokens that row i shares with row i - 1. A node at depth d sees d + 1 nodes.
        """
        pairs = lengths * (lengths + 1) - shared * (shared + 1)
        return self.cost(tokens=int((lengths - shared).sum()), pairs=int(pairs.sum()) / 2, calls=1)

    def cost_of_rows(self, lengths: NDArray[np.int64]) -> float:
        """Cost of a pass over padded rows of these lengths."""
        padded, longest = len(lengths) * int(lengths.max()), int(lengths.max())
        return self.cost(tokens=padded, pairs=padded * longest / 2, calls=1)


def shares_enough(lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> bool:
    """True if sorted rows share enough tokens that a tree saves more than padding.

    >>> shares_enough(np.array([90, 100]), np.array([0, 20])), shares_enough(np.array([90, 100]), np.array([0, 2]))
    (True, False)
    """
    return bool(shared.sum() >= LEAST_SHARED * lengths.sum())


def pays(tree: float, rows: float) -> bool:
    """True if a pass along a tree, at cost `tree`, is to be preferred to padded rows at cost `rows`.

    >>> pays(tree=9e8, rows=3e9), pays(tree=9.9e8, rows=1e9)
    (True, False)
    """
    return tree <= MARGIN * rows


ROW_TOKENS, SAVED = "row_tokens", "tokens_saved"
"""Names of sums in a LossReport: tokens of all rows if each is computed alone, and how many of them were shared."""


def tree_figures(reports: Iterable[LossReport]) -> dict[str, float]:
    """`tokens_saved`, and `tree_token_ratio`: tokens of rows over tokens computed, 1 if nothing was shared.

    >>> sums = {"row_tokens": 40.0, "tokens_saved": 30.0}
    >>> tree_figures([LossReport(micro_batch_id="m", num_samples=2, num_tokens=3.0, sums=sums)])
    {'tokens_saved': 30.0, 'tree_token_ratio': 4.0}
    """
    sums = [report.sums for report in reports]
    tokens, saved = (float(sum(each.get(name, 0.0) for each in sums)) for name in (ROW_TOKENS, SAVED))
    return {SAVED: saved, "tree_token_ratio": tokens / (tokens - saved)} if tokens else {}
