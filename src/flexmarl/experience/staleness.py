"""Decides how off-policy and how biased the training data is: staleness of tokens, publish lag and length bias.

staleness     versions between sampling a token and training on it; a turn may have runs of several versions
publish lag   seconds between making a version and serving it; tokens sampled in between are staler by one version
length bias   lengths that were trained on, compared with those admitted: what finishes late is easily left out
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.records import AnyTurn, PolicyName, Version


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of the sampled tokens of some turns, in versions."""

    mean: float
    """Mean over tokens: every token counts the same."""
    max: int


def staleness_of(turns: Iterable[AnyTurn], trained_at: Version) -> Staleness | None:
    """Mean and largest staleness of tokens, if `trained_at` is the version in training; None without tokens."""
    total, count, largest = 0, 0, 0
    for turn in turns:
        ends = [run.start for run in turn.versions[1:]] + [turn.num_tokens]
        for run, end in zip(turn.versions, ends, strict=True):
            if end > run.start:
                total += (trained_at - run.version) * (end - run.start)
                count += end - run.start
                largest = max(largest, trained_at - run.version)
    return Staleness(total / count, largest) if count else None


class PublishLag:
    """Remembers when each policy's newest version was made."""

    def __init__(self) -> None:
        self._made: dict[PolicyName, tuple[Version, float]] = {}

    def made(self, policy: PolicyName, version: Version, at: float) -> None:
        """Notes that the update that makes the version ended at time `at`."""
        self._made[policy] = version, at

    def served(self, policy: PolicyName, version: Version, at: float) -> float | None:
        """Seconds from making the version to `at`, when every live instance serves it; None if nothing was made yet."""
        if policy not in self._made:
            return None
        newest, made_at = self._made[policy]
        assert version == newest, f"version {version} of '{policy}' is served, but {newest} was made last"
        return at - made_at


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Comparison of two samples of lengths. Without bias, `ratio` is 1 and `ks` is about 0."""

    ratio: float
    """Mean length trained on, divided by mean length admitted: below 1, long ones are missing."""
    ks: float
    """Kolmogorov-Smirnov distance: the largest gap between the two distribution functions, 0 to 1."""


def length_bias(trained: Sequence[float], admitted: Sequence[float]) -> LengthBias | None:
    """Compares lengths in tokens. None if either sample is empty, or if all admitted lengths are 0.

    >>> length_bias([10, 20], [10, 20, 90, 120])
    LengthBias(ratio=0.25, ks=0.5)
    """
    if not trained or not any(admitted):
        return None
    both = np.sort(np.concatenate((trained, admitted)))
    below = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (trained, admitted)]
    gap = np.abs(below[0] - below[1]).max()
    return LengthBias(float(np.mean(trained) / np.mean(admitted)), float(gap))
