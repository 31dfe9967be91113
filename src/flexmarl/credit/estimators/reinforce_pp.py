"""Decides advantages as REINFORCE++ does: what follows each token, discounted, on one scale for the whole step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from flexmarl.credit.estimators.ungrouped import Ungrouped, tokens_of, weighted
from flexmarl.credit.interface import Credit, CreditRow, Needs, in_order
from flexmarl.credit.returns import discounted_returns, token_rewards
from flexmarl.credit.whitening import Scope, whiten


class ReinforcePP(Ungrouped):
    """REINFORCE++ (arXiv 2501.03262): G_t = r_t + gamma G_next, then whitened; the step is its own baseline."""

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance; the paper has one policy, and takes the batch."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """They are compared with those of other tasks."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages per token."""
        ordered = in_order(rows)
        followed = {
            row.sample_id: discounted_returns(token_rewards(row), gamma=self.gamma) for row in ordered if row.num_tokens
        }
        credit = weighted(ordered, {sample_id: float(of_row.mean()) for sample_id, of_row in followed.items()})
        return whiten(replace(credit, token_advantages=tokens_of(followed)), rows, self.whiten)
