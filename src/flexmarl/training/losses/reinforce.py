"""Decides the REINFORCE loss: minus advantage times log-probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flexmarl.training.losses.base import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class Reinforce(PolicyLoss):
    """-A lp: the plain policy gradient; exact on samples of the current version, biased on older ones."""

    type: Literal["reinforce"] = "reinforce"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, which nothing bounds; it looks at neither `old_logprobs` nor `rows`."""
        return -advantages * logprobs, logprobs.detach() > 0
