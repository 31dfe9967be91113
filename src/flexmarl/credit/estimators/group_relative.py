"""Decides advantages by comparing each row with its group: A = (c - b) / D (docs/math.md section 5)."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.estimators.base import Grouped, Scores, rewards_of
from flexmarl.credit.interface import CreditRow, in_order
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
    A   (c - b) / D; 0 if all of x are equal, or, with scale=std, std <= min_std
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
    """scale=std: at or below this standard deviation a group's advantages are 0."""
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
