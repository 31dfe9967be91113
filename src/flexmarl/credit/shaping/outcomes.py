"""Decides the outcome as it was given.

Decides outcomes that are all or nothing.

Decides outcomes that are kept in [-1, 1].

Decides outcomes that count the more the later a turn is.

Decides outcomes that are discounted by the turns that could still have been taken.

Decides outcomes that count the more the later a call is made.

Decides outcomes that are discounted by the calls that could still have been made.

Decides outcomes that count the more the later a turn is, kept in [-1, 1].
"""

from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome, turn_of


class Unshaped(RowOutcome):
    """r: what the agent would have without any term."""

    type: Literal["none"] = "none"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """Itself."""
        return reward


class Binary(RowOutcome):
    """1 where r > threshold, else 0."""

    type: Literal["binary"] = "binary"
    threshold: float = 0.5
    """An outcome that equals it counts as 0."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """1 or 0."""
        return float(reward > self.threshold)


class Normalized(RowOutcome):
    """clip(r, -1, 1): nothing is scaled, whatever the name says elsewhere."""

    type: Literal["normalized"] = "normalized"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """Clipped."""
        return min(max(reward, -1.0), 1.0)


class TurnWeighted(RowOutcome):
    """r (k + 1) / K."""

    type: Literal["turn_weighted"] = "turn_weighted"
    max_turns: int = Field(default=8, ge=1)
    """K."""
    clip: bool = True
    """Turns beyond the last count no more than it."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the tag `turn`."""
        return reward * turn_weight(row, self.max_turns, clip=self.clip)


def turn_weight(row: CreditRow, max_turns: int, *, clip: bool) -> float:
    """(k + 1) / K."""
    weight = (turn_of(row) + 1) / max_turns
    return min(weight, 1.0) if clip else weight


class TurnDiscount(RowOutcome):
    """r gamma^max(0, K - 1 - k), or r gamma^max(0, K - k): turns beyond the last are not discounted."""

    type: Literal["turn_discount"] = "turn_discount"
    max_turns: int = Field(default=8, ge=1)
    """K."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """For each turn that could still have been taken."""
    last_undiscounted: bool = True
    """The first form: the last turn keeps its outcome. The second discounts it too."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the tag `turn`."""
        return reward * self.gamma ** max(0, self.max_turns - self.last_undiscounted - turn_of(row))


class HopWeighted(RowOutcome):
    """r clip((h + 1) / H, 0, 1). Where r < 0, early calls are punished less."""

    type: Literal["hop_weighted"] = "hop_weighted"
    max_hops: int = Field(default=10, ge=1)
    """H."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the number of the call in its episode."""
        return reward * min((row.hop + 1) / self.max_hops, 1.0)


class HopDiscount(RowOutcome):
    """r gamma^max(0, H - h)."""

    type: Literal["hop_discount"] = "hop_discount"
    max_hops: int = Field(default=10, ge=1)
    """H."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """For each call that could still have been made."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the number of the call in its episode."""
        return reward * self.gamma ** max(0, self.max_hops - row.hop)


class Shaped(RowOutcome):
    """clip(r (k + 1) / K, -1, 1)."""

    type: Literal["shaped"] = "shaped"
    max_turns: int = Field(default=8, ge=1)
    """K."""
    clip: bool = True
    """Turns beyond the last count no more than it."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the tag `turn`."""
        return min(max(reward * turn_weight(row, self.max_turns, clip=self.clip), -1.0), 1.0)
