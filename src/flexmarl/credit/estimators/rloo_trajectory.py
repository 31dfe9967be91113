"""Decides advantages as RLOO does with one observation per episode, the reward of its first turn."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import Centre, GroupRelative, Unit
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class RlooTrajectory(GroupRelative):
    """Dr.MAS's RLOO over whole episodes: A = n/(n-1) (reward - mean of the episodes' first rewards)."""

    type: Literal["rloo_trajectory"] = "rloo_trajectory"
    key: GroupKey = ("task",)
    unit: Unit = "trajectory_first"
    centre: Centre = "leave_one_out"
    singleton: Singleton = "raw"
