"""Decides the loss of GMPO (Zhao et al. 2025): the geometric mean of a row's clipped token ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flexmarl.training.losses.base import RowLoss

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Gmpo(RowLoss):
    """-A exp(mean of d') per row, d' the token's log-ratio, clipped to [-clip_low, clip_high] where that is profitable.

    A row's value stands at each of its tokens, so that their mean is it.
    """

    one_advantage_per_row: ClassVar[bool] = True

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0, description="The log-ratio's lower bound is -clip_low.")
    clip_high: float = Field(default=0.4, ge=0, description="The log-ratio's upper bound.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose log-ratio was clipped in the profitable direction."""
        log_ratio, sign = logprobs - old_logprobs, advantages.sign()
        plain, bounded = sign * log_ratio, sign * log_ratio.clamp(-self.clip_low, self.clip_high)
        # Not bounded from below where A > 0 nor above where A < 0: cut at 20, so that the mean's exp stays finite.
        mean = rows.mean(sign * plain.minimum(bounded)).clamp(-20, 20)
        return -advantages * rows.spread(mean.exp()), (bounded < plain).detach()
