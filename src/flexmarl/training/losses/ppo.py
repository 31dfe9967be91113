"""Decides the clipped loss of PPO (Schulman et al. 2017), with the wider upper bound of DAPO and the dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexmarl.training.losses.base import PolicyLoss, clipped_surrogate, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Ppo(PolicyLoss):
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0, at most -A dual_clip.

    On samples of the current version rho is 1 and the gradient is that of -A lp, whatever the bounds.
    """

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1, description="The ratio's lower bound is 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0, description="The ratio's upper bound is 1 + clip_high.")
    dual_clip: float | None = Field(
        default=3.0, gt=1, description="Bound on the ratio where the advantage is negative; null is off."
    )

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose ratio left the bounds in the profitable direction or passed the dual clip."""
        rho = ratio(logprobs, old_logprobs)
        loss, was_clipped = clipped_surrogate(rho, advantages, 1 - self.clip_low, 1 + self.clip_high)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            beyond = (advantages < 0) & (loss > bound)
            loss, was_clipped = bound.where(beyond, loss), was_clipped | beyond
        return loss, was_clipped
