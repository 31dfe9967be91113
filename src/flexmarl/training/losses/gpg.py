"""Decides the loss of GPG (Chu et al. 2025): that of REINFORCE; what is its own, alpha, is in the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flexmarl.training.losses.base import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Gpg(PolicyLoss):
    """-A lp, to go with credit.estimator type gpg, whose advantages it is named after."""

    type: Literal["gpg"] = "gpg"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, which nothing bounds; it looks at neither `old_logprobs` nor `rows`."""
        return -advantages * logprobs, logprobs.detach() > 0
