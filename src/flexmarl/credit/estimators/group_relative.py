"""Decides advantages by comparing each row with its group: A = (c - b) / D (docs/math.md section 5)."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from flexmarl.credit.effect import Effect, effect_of
from flexmarl.credit.estimators.base import EstimatorBase
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, GroupKey, Needs, in_order
from flexmarl.credit.keys import Group, Requirement, group_name, group_rows
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId

Unit = Literal["row", "trajectory_mean", "trajectory_first"]
Singleton = Literal["zero", "raw", "zero_unless_all", "drop", "error"]
Scores = NDArray[np.float64]


class GroupRelative(EstimatorBase):
    """The general form; each preset sets its parameters to what its paper or its code does.

    x   observations of the group, by `unit`
    c   what a row is compared as: its score, or its episode's mean
    A   (c - mean(x)) / D,   D = 1 or max(std(x), std_floor) + eps;   0 where all of x are equal or std <= min_std
    """

    key: GroupKey = ("task", "agent")
    """Tags whose equal values form a group, or such tags per agent ("*": every other agent)."""
    require: tuple[Requirement, ...] = ("one_task",)
    """Facts asserted for every group; a violation raises."""
    unit: Unit = "row"
    """One observation is a row; the mean of an episode's rows, as which they are then compared; or its first row."""
    scale: Literal["none", "std"] = "none"
    """Division by the group's standard deviation favours nearly solved and nearly hopeless tasks."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the divisor."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation; 0: the population's."""
    min_std: float = Field(default=0.0, ge=0)
    """At or below this standard deviation a group's advantages are 0."""
    std_floor: float = Field(default=0.0, ge=0)
    """Least divisor: keeps small penalties small in groups that are otherwise constant."""
    singleton: Singleton = "zero"
    """A group with one observation: A = 0; the reward itself; 0 unless all groups of the step are such; weight 0; an
    error."""
    tol: float = Field(default=1e-6, ge=0)
    """Rewards that differ by no more count as equal in the report."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Worst and best reward: what the report calls too hard and too easy."""

    @field_validator("key")
    @classmethod
    def _key_names_tags(cls, key: GroupKey) -> GroupKey:
        keys = [key] if isinstance(key, tuple) else list(key.values())
        if not keys or not all(keys):
            raise ValueError(f"key: {key!r} names no tag; use tags such as ['task', 'agent']")
        return key

    @model_validator(mode="after")
    def _range_is_ordered(self) -> "GroupRelative":
        bottom, top = self.reward_range
        if bottom >= top:
            raise ValueError(f"reward_range: {bottom} is not below {top}; give the worst reward, then the best")
        return self

    @property
    def needs(self) -> Needs:
        """Whole groups; the whole step where a lone row's fate depends on the other groups."""
        return "batch" if self.singleton == "zero_unless_all" else "group"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages, weights and a report per agent."""
        ordered = in_order(rows)
        groups = group_rows([row for row in ordered if row.num_tokens], self.key, self.require)
        sizes = {group: self._num_observations(members) for group, members in groups.items()}
        all_alone = all(size == 1 for size in sizes.values())
        # Rows without sampled tokens keep these.
        advantages: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        weights: dict[SampleId, float] = {row.sample_id: 0.0 for row in ordered}
        report: dict[AgentName, AgentReport] = {row.agent: AgentReport() for row in ordered}
        for row in ordered:
            if not row.num_tokens:
                report[row.agent] += AgentReport(empty=1)

        for group, members in groups.items():
            if sizes[group] == 1:
                values, weight = self._alone(group, members, all_alone)
            else:
                values, weight = self._compared(members), 1.0
            for row, advantage in zip(members, values, strict=True):
                advantages[row.sample_id] = float(advantage)
                weights[row.sample_id] = weight
                if not weight:
                    report[row.agent] += AgentReport(dropped_singleton=1)
            seen = self._describe(members, sizes[group])
            for agent in {row.agent: None for row in members}:
                report[agent] += seen
        return Credit(advantages=advantages, weights=weights, report=report)

    def _compared(self, members: Sequence[CreditRow]) -> Scores:
        compared, observations = self._observe(members)
        # The mean of equal numbers may differ from them in the last bit, which 1/eps would magnify.
        equal = observations.min() == observations.max()
        centred = compared - (observations[0] if equal else observations.mean())
        if self.scale == "none":
            return centred
        std = 0.0 if equal else observations.std(ddof=self.ddof)
        if std <= self.min_std:
            return np.zeros_like(centred)
        return centred / (max(std, self.std_floor) + self.eps)

    def _alone(self, group: Group, members: Sequence[CreditRow], all_alone: bool) -> tuple[Scores, float]:
        if self.singleton == "error":
            raise CreditError(
                f"group ({group_name(group)}) has one observation, and singleton is 'error'; "
                f"play more episodes per task, use a coarser key, or another singleton option"
            )
        if self.singleton == "raw" or (self.singleton == "zero_unless_all" and all_alone):
            return self._observe(members)[0] / (1.0 if self.scale == "none" else 1.0 + self.eps), 1.0
        return np.zeros(len(members)), 0.0 if self.singleton == "drop" else 1.0

    def _observe(self, members: Sequence[CreditRow]) -> tuple[Scores, Scores]:
        """(c of every row, the group's observations x)."""
        scores = np.array([row.reward for row in members], np.float64)
        if self.unit == "row":
            return scores, scores
        places: dict[str, list[int]] = {}
        for place, row in enumerate(members):
            places.setdefault(row.episode, []).append(place)
        if self.unit == "trajectory_first":
            return scores, scores[[of_episode[0] for of_episode in places.values()]]
        means = {episode: scores[of_episode].mean() for episode, of_episode in places.items()}
        return np.array([means[row.episode] for row in members]), np.array(list(means.values()))

    def _num_observations(self, members: Sequence[CreditRow]) -> int:
        return len(members) if self.unit == "row" else len({row.episode for row in members})

    def _describe(self, members: Sequence[CreditRow], size: int) -> AgentReport:
        bottom, top = self.reward_range
        rewards = [row.reward for row in members if row.reward is not None]
        effect = effect_of(rewards, tol=self.tol, bottom=bottom, top=top)
        return AgentReport(
            groups=1,
            group_sizes=(size,),
            effective=effect is Effect.EFFECTIVE,
            too_easy=effect is Effect.TOO_EASY,
            too_hard=effect is Effect.TOO_HARD,
            flat=effect is Effect.FLAT,
        )
