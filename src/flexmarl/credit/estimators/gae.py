"""Decides advantages as PPO does: what followed each token, against what a critic expected."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from flexmarl.credit.estimators.ungrouped import Ungrouped, tokens_of, weighted
from flexmarl.credit.interface import Credit, CreditRow, Extra, Needs, in_order
from flexmarl.credit.returns import generalised_advantages, token_rewards, token_values
from flexmarl.credit.whitening import Scope, whiten


class Gae(Ungrouped):
    """Generalised advantages (arXiv 1506.02438) over the tokens of each turn, then whitened; returns are not."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """1: all that followed, less what was expected; 0: the next token's value stands for all that follows."""
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """A critic may have expected others."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    @property
    def uses(self) -> frozenset[Extra]:
        """A critic's values."""
        return frozenset[Extra]({"values"})

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages per token; as returns, what a critic should have expected: advantage plus value."""
        ordered = in_order(rows)
        sampled = [row for row in ordered if row.num_tokens]
        values = {row.sample_id: token_values(row) for row in sampled}
        found = {
            row.sample_id: generalised_advantages(
                token_rewards(row), values[row.sample_id], gamma=self.gamma, lam=self.lam
            )
            for row in sampled
        }
        credit = replace(
            weighted(ordered, {sample_id: float(of_row.mean()) for sample_id, of_row in found.items()}),
            token_advantages=tokens_of(found),
            returns=tokens_of({sample_id: of_row + values[sample_id] for sample_id, of_row in found.items()}),
        )
        return whiten(credit, rows, self.whiten)
