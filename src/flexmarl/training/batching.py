"""Passes of rows on torch: which rows share one, how they are padded, and which flat tokens are whose."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexmarl.records import IntArray


@dataclass(frozen=True, slots=True)
class Rows:
    """The N tokens of B rows, one row after the other. Rows may be empty."""

    of_token: Tensor
    """[N] int64: the number of each token's row, ascending."""
    lengths: Tensor
    """[B] int64: number of tokens of each row."""

    def sum(self, values: Tensor) -> Tensor:
        """[B] sums of values [N]; 0 for an empty row."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.of_token, values)

    def mean(self, values: Tensor) -> Tensor:
        """[B] means of values [N]; 0 for an empty row."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, of_rows: Tensor) -> Tensor:
        """[N] the value of each token's row, from values [B]."""
        return of_rows[self.of_token]


PASS_OVERHEAD_TOKENS = 192
"""Cost of starting one more pass on a CPU, in tokens. With 0.8M parameters, values from 64 to 384 are equally fast, and
larger ones gradually slower."""


def plan_passes(
    lengths: NDArray[np.int64], max_tokens: int, overhead: float = PASS_OVERHEAD_TOKENS
) -> list[NDArray[np.int64]]:
    """Row numbers of each pass. Rows of similar length share a pass, so that (padded tokens + overhead) is least.

    `max_tokens` bounds the padded tokens of a pass of two rows or more; a longer row goes alone. `overhead` is the cost
    of one pass, in tokens. The plan is optimal, by dynamic programming over the rows in order of length.

    >>> [rows.tolist() for rows in plan_passes(np.array([900, 10, 880, 12]), max_tokens=4096)]
    [[1, 3], [2, 0]]
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    best = np.zeros(len(ordered) + 1)
    first = np.zeros(len(ordered), dtype=np.int64)
    for last, length in enumerate(ordered):
        reach = max(0, last + 1 - max(1, max_tokens // max(int(length), 1)))
        costs = best[reach : last + 1] + np.arange(last + 1 - reach, 0, -1) * length
        first[last] = reach + int(costs.argmin())
        best[last + 1] = costs.min() + overhead
    passes, end = [], len(ordered)
    while end:
        start = first[end - 1]
        passes.append(order[start:end])
        end = start
    return passes[::-1]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows for one forward pass. Padding is on the right, where causal attention hides it, so no mask is needed."""

    input_ids: NDArray[np.int64]
    """[B, T], without each row's last token, which predicts nothing; T is one less than the longest row."""
    positions: NDArray[np.int64]
    """[N] indices into the flattened [B * T] hidden states that predict the trained tokens, row after row."""
    targets: NDArray[np.int64]
    """[N] the trained tokens."""


def pad(ids: Sequence[IntArray], trained: Sequence[NDArray[np.bool_]]) -> PaddedRows:
    """Pads rows of token ids. `trained` marks the trained tokens of each row; its first token cannot be one."""
    lengths = np.array([len(row) for row in ids])
    grid = np.zeros((len(ids), int(lengths.max())), dtype=np.int64)
    is_trained = np.zeros(grid.shape, dtype=np.bool_)
    filled = np.arange(grid.shape[1]) < lengths[:, None]
    grid[filled] = np.concatenate(ids)
    is_trained[filled] = np.concatenate(trained)
    labels = is_trained[:, 1:]
    return PaddedRows(
        input_ids=np.ascontiguousarray(grid[:, :-1]), positions=np.flatnonzero(labels), targets=grid[:, 1:][labels]
    )


def rows_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Rows:
    """Rows with these numbers of tokens.

    >>> rows_of([2, 0, 1]).of_token.tolist()
    [0, 0, 2]
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return Rows(torch.arange(len(counts), device=device).repeat_interleave(counts), counts)
