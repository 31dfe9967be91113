"""Decides the loss of SAPO (Gao et al. 2025): a sigmoid in place of a clip, so that no gradient breaks off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexmarl.training.losses.base import RowLoss, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Sapo(RowLoss):
    """-A (4 / tau) sigmoid(tau (rho - 1)): slope -A at rho = 1, less on both sides."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, description="How fast the slope fades where A > 0.")
    tau_negative: float = Field(default=1.05, gt=0, description="How fast it fades where A <= 0.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, in which no bound acts; it does not look at `rows`."""
        positive = (advantages > 0).to(advantages.dtype)
        tau = self.tau_positive * positive + self.tau_negative * (1 - positive)
        gate = (tau * (ratio(logprobs, old_logprobs) - 1)).sigmoid()
        return -advantages * (4 / tau) * gate, logprobs.detach() > 0
