"""Decides the loss of CISPO (MiniMax 2025): REINFORCE under a bounded weight, so that no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexmarl.training.losses.base import PolicyLoss, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Cispo(PolicyLoss):
    """-clip(rho, 1 - clip_low, 1 + clip_high) A lp, the weight without gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1, description="The weight's lower bound is 1 - clip_low; 1: none.")
    clip_high: float = Field(default=4.0, ge=0, description="The weight's upper bound is 1 + clip_high.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose weight is at a bound."""
        rho = ratio(logprobs.detach(), old_logprobs)
        weight = rho.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * advantages * logprobs, weight != rho
