"""Decides how much of the training was hidden behind rollout.

    trainer/solver      ██████    ██    ░░░          █ hidden    ░ not hidden
    trainer/verifier       █████      █ ░░
    rollout          ▕───────────────────▏

A trainer is busy in the union of its intervals. The part of this union that lies inside rollout is hidden. Busy and
hidden seconds are each added up over the trainers: a second in which two trainers work counts twice in both sums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Training, and the part of it that was hidden behind rollout."""

    training_s: float = 0.0
    """Busy seconds, added up over the trainers."""
    hidden_s: float = 0.0
    """The busy seconds that lie inside rollout."""

    @property
    def hidden(self) -> float | None:
        """Share of training that is hidden, 0 to 1; None if nothing was trained."""
        return self.hidden_s / self.training_s if self.training_s > 0 else None


def overlap(training: Mapping[str, Iterable[Interval]], rollout: Iterable[Interval]) -> Overlap:
    """Computes the overlap of `training`, by trainer, with `rollout`. Intervals may be in any order and may overlap.

    >>> overlap({"trainer/solver": [(0.0, 2.0), (3.0, 5.0)], "trainer/verifier": [(3.0, 4.0)]}, [(1.0, 4.0)])
    Overlap(training_s=5.0, hidden_s=3.0)
    """
    played = union(rollout)
    busy = [union(intervals) for intervals in training.values()]
    return Overlap(
        training_s=sum(map(seconds, busy)), hidden_s=sum(seconds(intersection(worked, played)) for worked in busy)
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of the intervals, as disjoint intervals in order.

    >>> union([(4, 5), (0, 2), (1, 3), (7, 7)])
    [(0, 3), (4, 5)]
    """
    merged: list[Interval] = []
    for began, ended in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(ended, merged[-1][1]))
        else:
            merged.append((began, ended))
    return merged


def intersection(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments that lie in both lists. Each list must be disjoint and in order; so is the result.

    >>> intersection([(0, 3), (4, 6)], [(1, 5)])
    [(1, 3), (4, 5)]
    """
    common: list[Interval] = []
    left, right = 0, 0
    while left < len(some) and right < len(others):
        began = max(some[left][0], others[right][0])
        ended = min(some[left][1], others[right][1])
        if ended > began:
            common.append((began, ended))
        if some[left][1] < others[right][1]:
            left += 1
        else:
            right += 1
    return common


def seconds(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(ended - began for began, ended in intervals)
