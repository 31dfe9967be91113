"""Decides advantages as GRPO does over the episodes of a task, however many turns each took."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale, Unit
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class GrpoTrajectory(GroupRelative):
    """GRPO with one observation per episode, the mean of its turns: long episodes weigh no more than short ones."""

    type: Literal["grpo_trajectory"] = "grpo_trajectory"
    key: GroupKey = ("task",)
    unit: Unit = "trajectory_mean"
    scale: Scale = "std"
    singleton: Singleton = "raw"
