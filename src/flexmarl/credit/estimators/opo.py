"""Decides advantages as OPO does: against the mean reward of a token, not of a turn."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import Centre, GroupRelative
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class Opo(GroupRelative):
    """OPO (arXiv 2505.23585): with rewards weighted by length, advantages of all tokens of a group sum to 0."""

    type: Literal["opo"] = "opo"
    key: GroupKey = ("task",)
    centre: Centre = "length_weighted"
    singleton: Singleton = "raw"
