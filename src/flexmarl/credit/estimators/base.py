"""Decides the common part of all estimators: defaults, groups, the credit of lone rows, and the report.

`EstimatorBase`   the defaults of every estimator
`Ungrouped`       estimators that do not compare rows in groups
`Grouped`         estimators that compare rows inside groups
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from flexmarl.credit.filters import RewardRange, describe
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, Extra, GroupKey, LaterCalls, Needs, in_order
from flexmarl.credit.returns import Steps
from flexmarl.credit.rows import Group, Requirement, group_name, group_rows, led
from flexmarl.errors import CreditError
from flexmarl.records import SampleId
from flexmarl.settings import Settings


class EstimatorBase(Settings, ABC):
    """Base of all estimators. A subclass is its own settings: it adds a `type`, a `key`, its options and `estimate`."""

    follows_calls: ClassVar[bool] = False
    """True if it follows calls one by one, as if an episode were a single path. It cannot handle trees of turns."""
    has_fixed_baseline: ClassVar[bool] = False
    """True if the baseline of a return does not depend on what is sampled from the call on."""
    compares_parts: ClassVar[bool] = False
    """True if it compares the parts of a reward one by one, and not their sum."""

    @property
    def later_calls(self) -> LaterCalls | None:
        """None: it does not add up the rewards of later calls."""
        return None

    @property
    def grouping(self) -> GroupKey:
        """The key, with no further tags."""
        return getattr(self, "key")  # noqa: B009  # each kind has its own default, or a property

    @property
    def needs_branches(self) -> bool:
        """True if it compares the candidates of a turn. It can handle only trees of turns."""
        return False

    @property
    def lone_rows(self) -> str | None:
        """None: a row alone in its group teaches."""
        return None

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if it can learn from a task whose rewards are all equal. No filter drops such a task then."""
        return False

    @property
    def needs(self) -> Needs:
        """Whole groups."""
        return "group"

    @property
    def uses(self) -> frozenset[Extra]:
        """Nothing besides rewards."""
        return frozenset()

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with the rewards that are compared: here their own. Filters use them."""
        return rows

    @abstractmethod
    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """See `Estimator`."""


class Ungrouped(EstimatorBase):
    """Base of estimators that do not compare rows in groups."""

    @property
    def key(self) -> GroupKey:
        """Key for the filter, which looks at each agent's turns on a task. The estimator itself compares nothing."""
        return ("task", "agent")


def weighted(ordered: Sequence[CreditRow], advantages: Mapping[SampleId, float]) -> Credit:
    """Credit with one advantage per row. A row that is not in `advantages` gets weight 0.

    Such a row has no sampled tokens, or nothing to be compared with.
    """
    empty = Counter(row.agent for row in ordered if not row.num_tokens)
    alone = Counter(row.agent for row in ordered if row.num_tokens and row.sample_id not in advantages)
    agents = dict.fromkeys(row.agent for row in ordered)
    report = {agent: AgentReport(empty=empty[agent], dropped_singleton=alone[agent]) for agent in agents}
    return Credit(
        advantages={row.sample_id: advantages.get(row.sample_id, 0.0) for row in ordered},
        weights={row.sample_id: float(row.sample_id in advantages) for row in ordered},
        report=report,
    )


def tokens_of(steps: Mapping[SampleId, Steps]) -> dict[SampleId, tuple[float, ...]]:
    """The same numbers as tuples, as `Credit` holds them."""
    return {sample_id: tuple(of_row.tolist()) for sample_id, of_row in steps.items()}


Singleton = Literal["zero", "raw", "zero_unless_all", "drop", "error"]
Scores = NDArray[np.float64]


class Grouped(EstimatorBase):
    """Base of estimators that compare rows with an equal key with one another, and with no others."""

    key: GroupKey = ("task", "agent")
    """Columns and tags whose equal values form a group, or such names per agent ("*": every other agent)."""
    require: tuple[Requirement, ...] = ("one_task",)
    """Facts that every group must satisfy; a violation is an error."""
    singleton: Singleton = "zero"
    """Advantage in a group with one observation. zero: 0; raw: the reward itself; zero_unless_all: 0, but raw if all
    groups of the step have one observation; drop: 0, with weight 0; error: an error."""
    tol: float = Field(default=1e-6, ge=0)
    """Rewards that differ by at most this much count as equal in the report."""
    reward_range: RewardRange = (0.0, 1.0)
    """Worst and best reward. The report calls a group with the worst alone too hard, with the best alone too easy."""

    @field_validator("key")
    @classmethod
    def _key_names_tags(cls, key: GroupKey) -> GroupKey:
        keys = [key] if isinstance(key, tuple) else list(key.values())
        if not keys or not all(keys):
            raise ValueError(f"key: {key!r} names no tag; use tags such as ['task', 'agent']")
        return key

    @property
    def lone_rows(self) -> str | None:
        """The value of `singleton`, if a lone row teaches nothing by it."""
        return self.singleton if self.singleton in ("zero", "drop", "error") else None

    @property
    def needs(self) -> Needs:
        """Whole groups; the whole step if the credit of a lone row depends on the other groups."""
        return "batch" if self.singleton == "zero_unless_all" else "group"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages, weights and a report per agent. Rows without sampled tokens are in no group and have weight 0."""
        ordered = in_order(rows)
        groups = self.groups(ordered)
        all_alone = all(self.num_observations(members) == 1 for members in groups.values())
        advantages: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        weights: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        empty = Counter(row.agent for row in ordered if not row.num_tokens)
        report = {agent: AgentReport(empty=empty[agent]) for agent in dict.fromkeys(row.agent for row in ordered)}
        for group, members in groups.items():
            values, weight = self._judge(group, members, all_alone)
            for row, advantage in zip(members, values, strict=True):
                advantages[row.sample_id] = float(advantage)
                weights[row.sample_id] = weight
                if not weight:
                    report[row.agent] += AgentReport(dropped_singleton=1)
            size = self.num_observations(members)
            seen = describe(members, size=size, tol=self.tol, reward_range=self.reward_range)
            for agent in {row.agent: None for row in members}:
                report[agent] += seen
        return Credit(advantages=advantages, weights=weights, report=report)

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups of `rows`, which are in order. All calls of an act are in the group of its first call.

        Raises CreditError for a group that breaks a requirement.
        """
        return group_rows(led([row for row in rows if row.num_tokens]), self.grouping, self.require)

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows, where later calls of an act have branch and context of its first call."""
        return led(rows)

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Number of observations of a group: its rows."""
        return len(members)

    def fate(self, group: Group, *, all_alone: bool) -> Literal["zero", "raw", "drop"]:
        """Treatment of a group with one observation. Raises CreditError if `singleton` is 'error'."""
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
        """Advantages of the rows of a group with one observation, if its treatment is 'raw'."""
        return rewards_of(members)


def rewards_of(members: Sequence[CreditRow]) -> Scores:
    """[N] the rewards. No row lacks one: `in_order` has checked that."""
    return np.array([math.nan if row.reward is None else row.reward for row in members], np.float64)
