"""Decides outcomes that are discounted by the calls that could still have been made."""

from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome


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
