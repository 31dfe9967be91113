"""Decides what estimators share that compare no row with other rows: the filter's key, weights and the report."""

from collections.abc import Mapping, Sequence

from flexmarl.credit.estimators.base import EstimatorBase
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, GroupKey
from flexmarl.credit.returns import Steps
from flexmarl.records import AgentName, SampleId


class Ungrouped(EstimatorBase):
    """A row's credit does not depend on what other rows of its task were given."""

    @property
    def key(self) -> GroupKey:
        """Compares nothing; a filter looks at each agent's turns on a task."""
        return ("task", "agent")


def weighted(ordered: Sequence[CreditRow], advantages: Mapping[SampleId, float]) -> Credit:
    """One advantage per row; a row that has none was not sampled, or has nothing to be compared with: weight 0."""
    report: dict[AgentName, AgentReport] = {}
    for row in ordered:
        seen = AgentReport(
            empty=not row.num_tokens, dropped_singleton=bool(row.num_tokens) and row.sample_id not in advantages
        )
        report[row.agent] = report.get(row.agent, AgentReport()) + seen
    return Credit(
        advantages={row.sample_id: advantages.get(row.sample_id, 0.0) for row in ordered},
        weights={row.sample_id: float(row.sample_id in advantages) for row in ordered},
        report=report,
    )


def tokens_of(steps: Mapping[SampleId, Steps]) -> dict[SampleId, tuple[float, ...]]:
    """The same, as credit holds it."""
    return {sample_id: tuple(of_row.tolist()) for sample_id, of_row in steps.items()}
