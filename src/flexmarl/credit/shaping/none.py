"""Decides the outcome as it was given."""

from typing import Literal

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import RowOutcome


class Unshaped(RowOutcome):
    """r: what the agent would have without any term."""

    type: Literal["none"] = "none"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """Itself."""
        return reward
