"""Decides advantages as ReMax does: each reward against that of a greedy play of the same task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from flexmarl.credit.estimators.base import EstimatorBase
from flexmarl.credit.estimators.ungrouped import tokens_of, weighted
from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, in_order
from flexmarl.credit.keys import group_rows
from flexmarl.credit.returns import Steps, discounted_returns, token_rewards
from flexmarl.records import SampleId


class ReMax(EstimatorBase):
    """ReMax (arXiv 2310.10505): A_t = what follows token t, less the mean reward of the greedy play's turns.

    The whole team plays greedily once per task, beside the episodes. An agent that had no turn in that play has nothing
    to be compared with on that task: its rows have weight 0.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["remax"] = "remax"
    key: GroupKey = ("task", "agent")
    """Whose turns of the greedy play are the baseline: the same agent's; or, with [task], the whole team's."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """The greedy play may have got another."""
        return True

    @property
    def uses(self) -> frozenset[Extra]:
        """A greedy play per group."""
        return frozenset[Extra]({"greedy"})

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages of all rows but the greedy ones, which have weight 0; per token where rewards are."""
        ordered = in_order(rows)
        found: dict[SampleId, Steps] = {}
        for members in group_rows([row for row in ordered if row.num_tokens], self.key).values():
            baseline = [row.reward for row in members if row.greedy and row.reward is not None]
            for row in members if baseline else ():
                if not row.greedy:
                    found[row.sample_id] = discounted_returns(token_rewards(row), gamma=1.0) - np.mean(baseline)
        credit = weighted(
            [row for row in ordered if not row.greedy],
            {sample_id: float(of_row.mean()) for sample_id, of_row in found.items()},
        )
        nothing = {row.sample_id: 0.0 for row in ordered if row.greedy}
        return replace(
            credit,
            advantages={**credit.advantages, **nothing},
            weights={**credit.weights, **nothing},
            token_advantages=tokens_of(found),
        )
