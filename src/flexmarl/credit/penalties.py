"""Decides what a call costs that was not valid: its reply, or its tool call, was not in the form asked for.

`before`   r_i -= c, and the group is compared with it in. With centring alone no advantage changes by more than c; with
           division by the standard deviation, a group that is otherwise constant turns c into an advantage of order 1,
           however small c is: give the estimator a `std_floor` then.
`after`    A_i -= c: neither compared nor scaled.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from flexmarl.credit.interface import Credit, CreditRow
from flexmarl.settings import Settings

PART = "invalid_action"


class InvalidAction(Settings):
    """A penalty for each call that was not valid."""

    penalty: float = Field(default=0.1, ge=0)
    """c."""
    order: Literal["before", "after"] = "before"
    """Before rows are compared, as a part of the reward; or after it, off the advantage."""

    def penalise(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """Shaped rows, with the penalty in their rewards if that is its place; outcomes stay."""
        return rows if self.order == "after" else [self._penalised(row) for row in rows]

    def lower(self, credit: Credit, rows: Sequence[CreditRow]) -> Credit:
        """The credit of these rows, with the penalty off their advantages if that is its place."""
        costs = {row.sample_id: 0.0 if row.valid else self.penalty for row in rows}
        if self.order == "before" or not any(costs.values()):
            return credit
        return replace(
            credit,
            advantages={
                name: advantage - costs[name] if credit.weights[name] else advantage
                for name, advantage in credit.advantages.items()
            },
            token_advantages={
                name: tuple(advantage - costs[name] for advantage in tokens)
                for name, tokens in credit.token_advantages.items()
            },
        )

    def _penalised(self, row: CreditRow) -> CreditRow:
        if row.reward is None:
            return row
        return row.pays(PART, 0.0 if row.valid else self.penalty)
