"""Decides advantages as GRPO does over all turns of a task, whoever spoke."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey


class Grpo(GroupRelative):
    """GRPO (arXiv 2402.03300) with verl's conventions: std with ddof 1, eps 1e-6, a lone row keeps its reward."""

    type: Literal["grpo"] = "grpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"
