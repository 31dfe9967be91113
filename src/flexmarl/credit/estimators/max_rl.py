"""Decides advantages as MaxRL does: distance from the group's mean in units of that mean."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.interface import GroupKey


class MaxRl(GroupRelative):
    """A = (r - mean) / mean: rare successes count most. Rewards must not be negative; 0 where all of them are 0."""

    type: Literal["max_rl"] = "max_rl"
    key: GroupKey = ("task",)
    scale: Scale = "mean"
