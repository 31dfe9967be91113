"""Decides the outcome of a turn from that turn alone: unchanged, binary, clipped, or weighted by its place.

In the formulas r is the outcome as it was given, k the index of the turn (its tag `turn`), and h the number of the call
in its episode; both count from 0.
"""

from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome, turn_of


class Unshaped(RowOutcome):
    """r, unchanged: the same as no term."""

    type: Literal["none"] = "none"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward` itself."""
        return reward


class Binary(RowOutcome):
    """1 if r > threshold, else 0."""

    type: Literal["binary"] = "binary"
    threshold: float = 0.5
    """An outcome equal to it counts as 0."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """1 if `reward` is above the threshold, else 0."""
        return float(reward > self.threshold)


class Normalized(RowOutcome):
    """clip(r, -1, 1). Nothing is scaled, unlike in other projects that use this name."""

    type: Literal["normalized"] = "normalized"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, clipped."""
        return min(max(reward, -1.0), 1.0)


class TurnWeighted(RowOutcome):
    """r (k + 1) / K: later turns count more."""

    type: Literal["turn_weighted"] = "turn_weighted"
    max_turns: int = Field(default=8, ge=1)
    """K: number of turns."""
    clip: bool = True
    """Turns after turn K count no more than turn K."""

    @property
    def first_by_last(self) -> float:
        """1 / K."""
        return 1 / self.max_turns

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`."""
        return reward * turn_weight(row, self.max_turns, clip=self.clip)


def turn_weight(row: CreditRow, max_turns: int, *, clip: bool) -> float:
    """(k + 1) / K, at most 1 with `clip`."""
    weight = (turn_of(row) + 1) / max_turns
    return min(weight, 1.0) if clip else weight


class TurnDiscount(RowOutcome):
    """r gamma^max(0, K - 1 - k), or r gamma^max(0, K - k). Turns beyond the last are not discounted."""

    type: Literal["turn_discount"] = "turn_discount"
    max_turns: int = Field(default=8, ge=1)
    """K: number of turns."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount for each turn that could still have been taken."""
    last_undiscounted: bool = True
    """true: the first formula, in which the last turn keeps its outcome. false: the second, which discounts it too."""

    @property
    def first_by_last(self) -> float:
        """gamma^(K - 1)."""
        return self.gamma ** (self.max_turns - 1)

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`."""
        return reward * self.gamma ** max(0, self.max_turns - self.last_undiscounted - turn_of(row))


class HopWeighted(RowOutcome):
    """r clip((h + 1) / H, 0, 1): later calls count more. If r < 0, early calls are punished less."""

    type: Literal["hop_weighted"] = "hop_weighted"
    max_hops: int = Field(default=10, ge=1)
    """H: number of calls."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the number of the call in its episode."""
        return reward * min((row.hop + 1) / self.max_hops, 1.0)


class HopDiscount(RowOutcome):
    """r gamma^max(0, H - h): earlier calls are discounted."""

    type: Literal["hop_discount"] = "hop_discount"
    max_hops: int = Field(default=10, ge=1)
    """H: number of calls."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount for each call that could still have been made."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the number of the call in its episode."""
        return reward * self.gamma ** max(0, self.max_hops - row.hop)


class Shaped(RowOutcome):
    """clip(r (k + 1) / K, -1, 1): later turns count more, within [-1, 1]."""

    type: Literal["shaped"] = "shaped"
    max_turns: int = Field(default=8, ge=1)
    """K: number of turns."""
    clip: bool = True
    """Turns after turn K count no more than turn K."""

    @property
    def first_by_last(self) -> float:
        """1 / K."""
        return 1 / self.max_turns

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`."""
        return min(max(reward * turn_weight(row, self.max_turns, clip=self.clip), -1.0), 1.0)
