"""Decides advantages as REINFORCE does: the reward itself, compared with nothing (Williams 1992)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from flexmarl.credit.estimators.base import EstimatorBase
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, GroupKey, Needs, in_order
from flexmarl.records import AgentName


class Reinforce(EstimatorBase):
    """A = reward. Needs no other row, so that a row may be trained as soon as its own episode has ended.

    No baseline: rewards that are all positive push every sampled token up. Give rewards of both signs.
    """

    type: Literal["reinforce"] = "reinforce"

    @property
    def key(self) -> GroupKey:
        """Compares nothing; a filter looks at each agent's turns on a task."""
        return ("task", "agent")

    @property
    def needs(self) -> Needs:
        """Each row alone."""
        return "row"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Every row's own reward; rows without sampled tokens have weight 0."""
        ordered = in_order(rows)
        empty: dict[AgentName, int] = defaultdict(int)
        for row in ordered:
            empty[row.agent] += not row.num_tokens
        return Credit(
            advantages={row.sample_id: (row.reward or 0.0) if row.num_tokens else 0.0 for row in ordered},
            weights={row.sample_id: 1.0 if row.num_tokens else 0.0 for row in ordered},
            report={agent: AgentReport(empty=count) for agent, count in empty.items()},
        )
