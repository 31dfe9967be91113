"""Decides what an estimator is unless it says otherwise: settings that compare whole groups.

Decides what estimators share that compare no row with other rows: the filter's key, weights and the report.

Decides what all comparisons inside groups share: who is in a group, what becomes of a lone row, the report.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from flexmarl.credit.filters import RewardRange, describe
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, Extra, GroupKey, Needs, in_order
from flexmarl.credit.returns import Steps
from flexmarl.credit.rows import Group, Requirement, group_name, group_rows, led
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId
from flexmarl.settings import Settings


class EstimatorBase(Settings, ABC):
    """The class of an estimator is its settings; it adds a `type`, a `key`, its options and `estimate`."""

    follows_calls: ClassVar[bool] = False
    """Whether it goes from call to call, as if there were one way through the episode: not for trees of turns."""
    adds_up_calls: ClassVar[bool] = False
    """Whether it adds up what the calls after a call earned: what else does so would count it twice."""
    has_fixed_baseline: ClassVar[bool] = False
    """Whether what a return is compared with is the same, whatever was sampled from the call on."""

    @property
    def grouping(self) -> GroupKey:
        """The key alone."""
        return getattr(self, "key")  # noqa: B009  # each kind has its own default, or a property

    @property
    def needs_branches(self) -> bool:
        """Whether it compares the candidates of a turn: for trees of turns alone."""
        return False

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether episodes of a task whose rewards are all equal teach it anything; if so, no filter drops the task."""
        return False

    @property
    def needs(self) -> Needs:
        """Whole groups."""
        return "group"

    @property
    def uses(self) -> frozenset[Extra]:
        """Nothing but rewards."""
        return frozenset()

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with the rewards that it compares, which filters look at: those that they have."""
        return rows

    @abstractmethod
    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """See `Estimator`."""


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


Singleton = Literal["zero", "raw", "zero_unless_all", "drop", "error"]
Scores = NDArray[np.float64]


class Grouped(EstimatorBase):
    """Rows with equal tags are compared with one another, and with no others."""

    key: GroupKey = ("task", "agent")
    """Tags whose equal values form a group, or such tags per agent ("*": every other agent)."""
    require: tuple[Requirement, ...] = ("one_task",)
    """Facts asserted for every group; a violation raises."""
    singleton: Singleton = "zero"
    """A group with one observation: A = 0; the reward itself; 0 unless all groups of the step are such; weight 0; an
    error."""
    tol: float = Field(default=1e-6, ge=0)
    """Rewards that differ by no more count as equal in the report."""
    reward_range: RewardRange = (0.0, 1.0)
    """Worst and best reward: what the report calls too hard and too easy."""

    @field_validator("key")
    @classmethod
    def _key_names_tags(cls, key: GroupKey) -> GroupKey:
        keys = [key] if isinstance(key, tuple) else list(key.values())
        if not keys or not all(keys):
            raise ValueError(f"key: {key!r} names no tag; use tags such as ['task', 'agent']")
        return key

    @property
    def needs(self) -> Needs:
        """Whole groups; the whole step where a lone row's fate depends on the other groups."""
        return "batch" if self.singleton == "zero_unless_all" else "group"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages, weights and a report per agent; rows without sampled tokens have no part in it."""
        ordered = in_order(rows)
        groups = self.groups(ordered)
        all_alone = all(self.num_observations(members) == 1 for members in groups.values())
        advantages: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        weights: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        report: dict[AgentName, AgentReport] = {row.agent: AgentReport() for row in ordered}
        for row in ordered:
            report[row.agent] += AgentReport(empty=not row.num_tokens)
        for group, members in groups.items():
            values, weight = self._judge(group, members, all_alone)
            for row, advantage in zip(members, values, strict=True):
                advantages[row.sample_id] = float(advantage)
                weights[row.sample_id] = weight
                report[row.agent] += AgentReport(dropped_singleton=not weight)
            size = self.num_observations(members)
            seen = describe(members, size=size, tol=self.tol, reward_range=self.reward_range)
            for agent in {row.agent: None for row in members}:
                report[agent] += seen
        return Credit(advantages=advantages, weights=weights, report=report)

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups of rows that are in order; all calls of an act are in the group of its first one.

        Raises CreditError for a group that breaks a requirement.
        """
        return group_rows(led([row for row in rows if row.num_tokens]), self.grouping, self.require)

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows, each call of an act where its first one is."""
        return led(rows)

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """How many observations a group has: its rows."""
        return len(members)

    def fate(self, group: Group, *, all_alone: bool) -> Literal["zero", "raw", "drop"]:
        """What becomes of a group with one observation."""
        if self.singleton == "error":
            raise CreditError(
                f"group ({group_name(group)}) has one observation, and singleton is 'error'; "
                f"play more episodes per task, use a coarser key, or another singleton option"
            )
        if self.singleton == "zero_unless_all":
            return "raw" if all_alone else "zero"
        return self.singleton

    def _judge(self, group: Group, members: Sequence[CreditRow], all_alone: bool) -> tuple[Scores, float]:
        if self.num_observations(members) > 1:
            return self._compare(members), 1.0
        match self.fate(group, all_alone=all_alone):
            case "raw":
                return self._raw(members), 1.0
            case "zero":
                return np.zeros(len(members)), 1.0
            case "drop":
                return np.zeros(len(members)), 0.0

    @abstractmethod
    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        """Advantages of the rows of a group with two observations or more."""

    def _raw(self, members: Sequence[CreditRow]) -> Scores:
        """Advantages of the rows of a group with one observation, where they are not 0."""
        return rewards_of(members)


def rewards_of(members: Sequence[CreditRow]) -> Scores:
    """The rewards, all of which are there: `in_order` has seen to that."""
    return np.array([math.nan if row.reward is None else row.reward for row in members], np.float64)
