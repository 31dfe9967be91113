"""Decides outcomes that count the more the later a turn is."""

from typing import Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome, turn_of


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
