"""Decides outcomes that count the more the later a call is made."""

from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome


class HopWeighted(RowOutcome):
    """r clip((h + 1) / H, 0, 1). Where r < 0, early calls are punished less."""

    type: Literal["hop_weighted"] = "hop_weighted"
    max_hops: int = Field(default=10, ge=1)
    """H."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """By the number of the call in its episode."""
        return reward * min((row.hop + 1) / self.max_hops, 1.0)
