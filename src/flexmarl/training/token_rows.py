"""Decides which of N flat tokens are one row's, for what is defined over whole rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of B rows, one row after the other; rows may be empty."""

    of_token: Tensor
    """[N] int64: the number of each token's row, ascending."""
    lengths: Tensor
    """[B] int64: tokens of each row."""

    def sum(self, values: Tensor) -> Tensor:
        """[B] sums of values [N]; 0 for an empty row."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.of_token, values)

    def mean(self, values: Tensor) -> Tensor:
        """[B] means of values [N]; 0 for an empty row."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, of_rows: Tensor) -> Tensor:
        """[N] for every token the value of its row, from [B]."""
        return of_rows[self.of_token]


def rows_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Rows:
    """Rows with so many tokens.

    >>> rows_of([2, 0, 1]).of_token.tolist()
    [0, 0, 2]
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return Rows(torch.arange(len(counts), device=device).repeat_interleave(counts), counts)
