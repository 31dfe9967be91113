"""Decides advantages as Dr.GRPO does: GRPO without the division by the standard deviation."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class DrGrpo(GroupRelative):
    """Dr.GRPO (arXiv 2503.20783); its paper sums losses over tokens and divides by a constant horizon."""

    type: Literal["dr_grpo"] = "dr_grpo"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"
