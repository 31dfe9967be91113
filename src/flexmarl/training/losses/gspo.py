"""Decides the loss of GSPO (Zheng et al. 2025): PPO's clip on the ratio of a whole row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexmarl.training.losses.base import RowLoss, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Gspo(RowLoss):
    """PPO's clipped loss, its ratio the geometric mean of the row's token ratios, with no dual clip.

    The token form: every token has the row's ratio as its value, and its own log-probability's gradient, so that tokens
    of a row may have different advantages. Where they have one, it is the gradient of the row's ratio itself.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1, description="The row ratio's lower bound is 1 - clip_low.")
    clip_high: float = Field(default=4e-4, ge=0, description="The row ratio's upper bound is 1 + clip_high.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens of rows whose ratio left the bounds in the profitable direction."""
        of_row = rows.spread(rows.mean(logprobs.detach() - old_logprobs))
        # Cut at 10, so that the ratio stays finite: a row's mean is far from it unless something is wrong.
        rho = (of_row + logprobs - logprobs.detach()).clamp(max=10).exp()
        return clipped_surrogate(rho, advantages, 1 - self.clip_low, 1 + self.clip_high)
