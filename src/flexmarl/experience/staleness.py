"""Decides how off-policy and how biased what is trained on is: staleness of tokens, publish lag, length bias.

staleness     versions between sampling a token and training on it; a turn may have runs of several versions
publish lag   seconds between making a version and serving it: tokens sampled meanwhile are stale by one more
length bias   lengths that were trained on against lengths that were admitted: what finishes late is easily left out
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.records import AnyTurn, PolicyName, Version


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of the sampled tokens of some turns."""

    mean: float
    """Every token counts the same."""
    max: int


def staleness_of(turns: Iterable[AnyTurn], trained_at: Version) -> Staleness | None:
    """How many versions older than `trained_at`, the weights being trained, the tokens are. None: there are none."""
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
    """When each policy's newest version was made."""

    def __init__(self) -> None:
        self._made: dict[PolicyName, tuple[Version, float]] = {}

    def made(self, policy: PolicyName, version: Version, at: float) -> None:
        """The update that makes the version is done."""
        self._made[policy] = version, at

    def served(self, policy: PolicyName, version: Version, at: float) -> float:
        """Seconds since the version was made, now that every live instance serves it."""
        newest, made_at = self._made[policy]
        assert version == newest, f"version {version} of '{policy}' is served, but {newest} was made last"
        return at - made_at


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Two samples of lengths compared; without bias, 1 and about 0."""

    ratio: float
    """Mean length trained on over mean length admitted: below 1, long ones are missing."""
    ks: float
    """Kolmogorov-Smirnov distance: the largest gap between the two distribution functions, 0 to 1."""


def length_bias(trained: Sequence[float], admitted: Sequence[float]) -> LengthBias | None:
    """Compares lengths, in tokens; None if either sample is empty or all that was admitted is empty.

    >>> length_bias([10, 20], [10, 20, 90, 120])
    LengthBias(ratio=0.25, ks=0.5)
    """
    if not trained or not any(admitted):
        return None
    both = np.sort(np.concatenate((trained, admitted)))
    below = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (trained, admitted)]
    gap = np.abs(below[0] - below[1]).max()
    return LengthBias(float(np.mean(trained) / np.mean(admitted)), float(gap))
