"""Decides advantages as AT-GRPO does: GRPO inside each agent and turn, among calls with one and the same prompt."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.keys import Requirement


class AtGrpo(GroupRelative):
    """AT-GRPO (arXiv 2510.11062). After the first turn only tree sampling gives several calls with equal prompts.

    With flat sampling later turns differ in their prompts, and `one_context` raises; `require: [one_task]` compares
    them all the same.
    """

    type: Literal["atgrpo"] = "atgrpo"
    key: GroupKey = ("task", "agent", "turn")
    require: tuple[Requirement, ...] = ("one_task", "one_context")
    scale: Scale = "std"
    singleton: Singleton = "zero_unless_all"
