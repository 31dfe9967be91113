"""Decides advantages by comparing each row with its group: A = (c - b) / D (docs/math.md section 5).

GDPO standardises every objective of the reward separately, then adds them up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.estimators.base import Grouped, Scores, Singleton, rewards_of
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs, in_order
from flexmarl.credit.order import Scope, whiten
from flexmarl.credit.rows import Group, means_of_acts, places_of_acts
from flexmarl.errors import CreditError
from flexmarl.records import CreditLine, SampleId

Unit = Literal["row", "act", "trajectory_mean", "trajectory_first"]
Centre = Literal["mean", "leave_one_out", "length_weighted"]
Scale = Literal["none", "std", "mean"]


NOTHING = CreditLine(0.0, math.inf)


class GroupRelative(Grouped):
    """The general form of comparing rows in groups. Each preset sets its parameters as its paper or its code does.

    x   the n observations of the group, by `unit`
    c   the score of a row: its reward, or its episode's mean (trajectory_mean)
    A   (c - b) / D; 0 if all of x are equal, or std <= min_std
    b   mean(x); the mean of the other observations; or the mean weighted by sampled tokens
    D   1; max(std(x), std_floor) + eps; or mean(x), for rewards that are never negative
    """

    unit: Unit = "row"
    """Observation: row, each row; act, the mean over an act's calls; trajectory_mean, the mean over an episode's rows,
    which is then the score of each of them; trajectory_first, an episode's first row."""
    centre: Centre = "mean"
    """Baseline of a row: the group's mean; the mean of its other observations; or the mean per sampled token."""
    scale: Scale = "none"
    """Divisor: none; the standard deviation, which favours nearly solved and nearly hopeless tasks; or the mean."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation; 0: the population's."""
    min_std: float = Field(default=0.0, ge=0)
    """At or below this standard deviation a group's advantages are 0."""
    std_floor: float = Field(default=0.0, ge=0)
    """Least standard deviation to divide by. It keeps small penalties small in groups that are otherwise constant."""

    @property
    def linear(self) -> bool:
        """True if a group's advantages are a linear function of scores that are known before the group is complete."""
        return self.needs == "group"

    def open_places(self, rows: Sequence[CreditRow]) -> dict[SampleId, tuple[Group, float]]:
        """Group and score of every sampled row, from the rows of one or more finished episodes."""
        return {
            row.sample_id: (group, float(score))
            for group, members in self.groups(in_order(rows)).items()
            for row, score in zip(members, self._observe(members)[0], strict=True)
        }

    def lines(self, rows: Sequence[CreditRow]) -> dict[Group, CreditLine]:
        """The line from scores to advantages of each complete group. Call it only if `linear`."""
        return {group: self._line_of(group, members) for group, members in self.groups(in_order(rows)).items()}

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups. Raises CreditError for a negative reward if `scale` is 'mean'."""
        for row in rows:
            if self.scale == "mean" and row.num_tokens and row.reward is not None and row.reward < 0:
                raise CreditError(
                    f"sample {row.sample_id} of agent {row.agent} has reward {row.reward}, and scale is 'mean'; "
                    f"rewards must not be negative there: shift them, or use scale=none"
                )
        return super().groups(rows)

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Number of rows, acts or episodes, by `unit`."""
        if self.unit == "row":
            return len(members)
        return len(places_of_acts(members)) if self.unit == "act" else len({row.episode for row in members})

    def _line_of(self, group: Group, members: Sequence[CreditRow]) -> CreditLine:
        if self.num_observations(members) > 1:
            return self._line(members)
        fates = {
            "raw": CreditLine(0.0, self._raw_divisor),
            "zero": NOTHING,
            "drop": CreditLine(0.0, math.inf, weight=0.0),
        }
        return fates[self.fate(group, all_alone=False)]

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        line = self._line(members)
        return (self._observe(members)[0] - line.baseline) / line.divisor

    def _raw(self, members: Sequence[CreditRow]) -> Scores:
        return self._observe(members)[0] / self._raw_divisor

    @property
    def _raw_divisor(self) -> float:
        return 1.0 + self.eps if self.scale == "std" else 1.0

    def _line(self, members: Sequence[CreditRow]) -> CreditLine:
        _, x, lengths = self._observe(members)
        n = len(x)
        baseline = _mean(x, lengths if self.centre == "length_weighted" else None)
        divisor = self._divisor(x)
        # Leave-one-out is a line, too: c - mean(others) = n / (n - 1) (c - mean(all)).
        return CreditLine(baseline, divisor * (n - 1) / n if self.centre == "leave_one_out" else divisor)

    def _divisor(self, x: Scores) -> float:
        match self.scale:
            case "none":
                return 1.0
            case "std":
                std = 0.0 if x.min() == x.max() else float(x.std(ddof=self.ddof))
                return math.inf if std <= self.min_std else max(std, self.std_floor) + self.eps
            case "mean":
                return _mean(x) or math.inf

    def _observe(self, members: Sequence[CreditRow]) -> tuple[Scores, Scores, Scores]:
        """(score c of every row, observations x of the group, sampled tokens of each observation)."""
        scores, lengths = rewards_of(members), np.array([row.num_tokens for row in members], np.float64)
        if self.unit == "row":
            return scores, scores, lengths
        if self.unit == "act":
            means, numbers = means_of_acts(members, scores)
            return scores, means, np.bincount(numbers, weights=lengths).astype(np.float64)
        places: dict[str, list[int]] = {}
        for place, row in enumerate(members):
            places.setdefault(row.episode, []).append(place)
        if self.unit == "trajectory_first":
            first = [of_episode[0] for of_episode in places.values()]
            return scores, scores[first], lengths[first]
        means = {episode: _mean(scores[of_episode]) for episode, of_episode in places.items()}
        tokens = np.array([lengths[of_episode].sum() for of_episode in places.values()])
        return np.array([means[row.episode] for row in members]), np.array(list(means.values())), tokens


def _mean(x: Scores, weights: Scores | None = None) -> float:
    # The average of equal numbers may differ from them in the last bit, and 1/eps would magnify the difference.
    return float(x[0] if x.min() == x.max() else np.average(x, weights=weights))


class Gdpo(GroupRelative):
    """GDPO: standardised separately, different mixes of parts get different advantages; together they may get the same.

        A = whitened(sum over objectives of weight x standardised) + sum over prices of weight x (price - group's mean)

    Objectives are the outcome, as reshaped by a term, and the workflow's other parts; one that a row lacks counts as 0.
    Prices are what settings add or take (penalties, bonuses, a divergence). They keep the size that the setting gives
    them: standardised, a price of a millionth would weigh as much as the outcome.
    """

    type: Literal["gdpo"] = "gdpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"
    weights: Mapping[str, float] = {}
    """Weight of each part by name; a price has the name of its term. Parts that are not named have weight 1."""
    whiten: Scope = "policy"
    """Tokens that share one mean and variance in the end."""

    compares_parts: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The weighted sum of the objectives' advantages, whitened, plus the centred prices."""
        credit = whiten(super().estimate(rows, memory), rows, self.whiten)
        paid = self._unscaled.estimate([replace(row, reward=self._price(row)) for row in rows]).advantages
        return replace(credit, advantages={name: value + paid[name] for name, value in credit.advantages.items()})

    @property
    def _unscaled(self) -> GroupRelative:
        """Estimator that centres prices in their group without scaling them."""
        same = {name: getattr(self, name) for name in ("key", "require", "unit", "centre", "singleton")}
        return GroupRelative.model_validate(same)

    def _price(self, row: CreditRow) -> float:
        return sum(self.weights.get(name, 1.0) * price for name, price in row.prices.items())

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._compare, members)

    def _raw(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._raw, members)

    def _sum(self, advantages: Callable[[Sequence[CreditRow]], Scores], members: Sequence[CreditRow]) -> Scores:
        total = np.zeros(len(members))
        for name in sorted({name for row in members for name in _objectives(row)}):
            of_part = advantages([replace(row, reward=_objectives(row).get(name, 0.0)) for row in members])
            total += self.weights.get(name, 1.0) * of_part
        return total


def _objectives(row: CreditRow) -> Mapping[str, float]:
    assert row.reward is not None, "in_order refuses rows without a reward"
    return row.objectives or row.parts or {"outcome": row.reward}
