"""How rewards become advantages: the `credit` section of a config."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from flexmarl.credit.by_agent import ByAgent
from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.default import Default
from flexmarl.credit.filters import FilterDecision, OutcomeFilter
from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, Needs
from flexmarl.credit.order import credit_of
from flexmarl.records import AgentName, FinishReason


class CreditSettings(BaseModel):
    """Shape, penalise, filter, estimate, whiten, balance (credit/order.py)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: AnyEstimator = Default()
    """Chosen by `type`; its options are its own."""
    per_agent: Mapping[AgentName, AnyEstimator] = Field(default={})
    """Agents that have an estimator of their own; it sees no other agent's rows."""
    filter: OutcomeFilter | None = OutcomeFilter()
    """Which tasks are worth training on; null trains on all."""
    untrained_finish: tuple[FinishReason, ...] = ()
    """Turns that ended so are no training rows, e.g. [length]: what was cut off is not learned."""
    untrained_in_baseline: bool = False
    """Whether the rewards of such turns still count among those that others are compared with."""
    ready: Literal["group", "trajectory"] = Field(
        default="group",
        description="When rows may be trained: when all episodes of their task have ended, or their own; the latter "
        "needs an estimator that looks at single rows, such as reinforce, and filter=null.",
    )

    @property
    def needs(self) -> Needs:
        """What one call of `credit` must be given: rows, whole groups, or the whole step."""
        return self._estimators.needs

    @property
    def uses(self) -> frozenset[Extra]:
        """What rows must carry beyond rewards."""
        return self._estimators.uses

    @property
    def key(self) -> GroupKey:
        """What rows are compared by."""
        return self._estimators.key

    def shape(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows of one task with their final rewards; their raw ones stay as `outcome`."""
        return rows

    def decide(self, rows: Sequence[CreditRow]) -> tuple[FilterDecision, ...]:
        """One decision per task of shaped rows; none without a filter."""
        if self.filter is None:
            return ()
        judged = [row for row in rows if not row.greedy and (row.trains or self.untrained_in_baseline)]
        return self.filter.decide(judged, key=self.key)

    def credit(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages and weights of shaped rows, which are as many at once as `needs` says."""
        return credit_of(rows, memory, estimator=self._estimators, untrained_in_baseline=self.untrained_in_baseline)

    @property
    def _estimators(self) -> ByAgent:
        return ByAgent(self.estimator, self.per_agent)
