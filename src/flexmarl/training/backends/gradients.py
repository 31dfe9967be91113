"""Gradient sums on a device: what the micro-batches since the last update add up to."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientCache:
    """One sum per parameter, in the parameters' order; None while nothing has a gradient."""

    def __init__(self) -> None:
        self.sums: list[Tensor] | None = None

    def add(self, gradients: list[Tensor]) -> None:
        """Takes the tensors over: the caller may not use them afterwards."""
        if self.sums is None:
            self.sums = gradients
        else:
            torch._foreach_add_(self.sums, gradients)

    def clear(self) -> None:
        """Forgets the sums."""
        self.sums = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that it holds."""
        return self.sums or ()
