"""Decides whether a group's rewards can teach anything, and if not, why not (docs/math.md section 6)."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator


def _ordered(given: tuple[float, float]) -> tuple[float, float]:
    bottom, top = given
    if bottom >= top:
        raise ValueError(f"reward_range: {bottom} is not below {top}; give the worst reward, then the best")
    return given


RewardRange = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""Worst and best reward."""


class Effect(StrEnum):
    """What a group is good for."""

    EFFECTIVE = "effective"
    TOO_EASY = "too_easy"
    TOO_HARD = "too_hard"
    FLAT = "flat"


def effect_of(rewards: Sequence[float], *, tol: float, bottom: float, top: float) -> Effect:
    """EFFECTIVE when max - min > tol.

    >>> str(effect_of([1.0, 1.0], tol=1e-6, bottom=0.0, top=1.0))
    'too_easy'
    """
    if max(rewards) - min(rewards) > tol:
        return Effect.EFFECTIVE
    if min(rewards) >= top - tol:
        return Effect.TOO_EASY
    if max(rewards) <= bottom + tol:
        return Effect.TOO_HARD
    return Effect.FLAT
