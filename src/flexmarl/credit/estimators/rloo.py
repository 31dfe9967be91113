"""Decides advantages as RLOO does: a turn's reward less the mean of the others'."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import Centre, GroupRelative
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class Rloo(GroupRelative):
    """RLOO (arXiv 2402.14740): unbiased, since a row's own reward is not in its baseline."""

    type: Literal["rloo"] = "rloo"
    key: GroupKey = ("task",)
    centre: Centre = "leave_one_out"
    singleton: Singleton = "raw"
