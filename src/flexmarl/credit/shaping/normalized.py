"""Decides outcomes that are kept in [-1, 1]."""

from typing import Literal

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome


class Normalized(RowOutcome):
    """clip(r, -1, 1): nothing is scaled, whatever the name says elsewhere."""

    type: Literal["normalized"] = "normalized"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """Clipped."""
        return min(max(reward, -1.0), 1.0)
