"""Decides no correction: the loss's own clipping, against what was recorded, is all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flexmarl.training.corrections.base import Correction, Sampled

if TYPE_CHECKING:
    from torch import Tensor


class NoCorrection(Correction):
    """Tokens of the current version have ratio 1 (docs/math.md section 4), older ones that to their engine's record."""

    type: Literal["none"] = "none"

    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """The current ones where the token is fresh, exact; the recorded ones elsewhere."""
        return tokens.current.where(tokens.fresh, tokens.recorded)

    def weights(self, tokens: Sampled) -> Tensor:
        """1."""
        return tokens.current.new_ones(len(tokens.current))
