"""Decides outcomes that are discounted by the turns that could still have been taken."""

from typing import Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome, turn_of


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
