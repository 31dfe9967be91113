"""Decides outcomes that count the more the later a turn is, kept in [-1, 1]."""

from typing import Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome
from flexmarl.credit.shaping.turn_weighted import turn_weight


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
