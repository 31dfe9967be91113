"""Decides advantages for the best of k: the best turn is reinforced by its lead over the second best."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.acts import means_of_acts, places_of_acts
from flexmarl.credit.estimators.grouped import Grouped, Scores, Singleton, rewards_of
from flexmarl.credit.interface import CreditRow, GroupKey


class PassAtK(Grouped):
    """The best act of a group gets (best - second best) / (std + eps), in all its calls, every other 0; so do ties.

    What the group as a whole achieves is its best act, and only that one's lead says who made it (arXiv 2503.19595).
    """

    type: Literal["pass@k"] = "pass@k"
    key: GroupKey = ("task",)
    scale: Literal["none", "std"] = "std"
    """Whether the lead is divided by the group's standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation; 0: the population's."""
    singleton: Singleton = "error"

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Acts: the calls of the best one are no ties."""
        return len(places_of_acts(members))

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        x, act_of_row = means_of_acts(members, rewards_of(members))
        second, best = np.sort(x)[-2:]
        if best == second:
            return np.zeros(len(members))
        divisor = x.std(ddof=self.ddof) + self.eps if self.scale == "std" else 1.0
        return np.where(x == best, (best - second) / divisor, 0.0)[act_of_row]
