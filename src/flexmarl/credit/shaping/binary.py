"""Decides outcomes that are all or nothing."""

from typing import Literal

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome


class Binary(RowOutcome):
    """1 where r > threshold, else 0."""

    type: Literal["binary"] = "binary"
    threshold: float = 0.5
    """An outcome that equals it counts as 0."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """1 or 0."""
        return float(reward > self.threshold)
