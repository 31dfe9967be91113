"""Decides advantages as AT-GRPO does: GRPO inside each agent and turn, among acts with one and the same prompt."""

from collections.abc import Sequence
from typing import Literal

from flexmarl.credit.acts import led
from flexmarl.credit.estimators.group_relative import GroupRelative, Scale, Unit
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import CreditRow, GroupKey
from flexmarl.credit.keys import Group, Requirement, also, group_rows


class AtGrpo(GroupRelative):
    """AT-GRPO (arXiv 2510.11062). After the first turn only tree sampling gives several acts with equal prompts.

    Where one context is required, each context is a group of its own: several branches or episodes are compared with
    their like. With flat sampling later turns differ in their prompts; `require: [one_task]` compares them all the
    same.
    """

    type: Literal["atgrpo"] = "atgrpo"
    key: GroupKey = ("task", "agent", "turn")
    require: tuple[Requirement, ...] = ("one_task", "one_context")
    unit: Unit = "act"
    scale: Scale = "std"
    singleton: Singleton = "zero_unless_all"

    @property
    def needs_branches(self) -> bool:
        """Without them only first turns have one context."""
        return "one_context" in self.require

    @property
    def grouping(self) -> GroupKey:
        """The key and the context, where one is required."""
        return also(self.key, "context_hash") if "one_context" in self.require else self.key

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups. Raises CreditError where candidates of one branch have seen different things."""
        branched = led([row for row in rows if row.num_tokens and "path" in row.tags])
        group_rows(branched, ("task", "episode", "branch"), [each for each in self.require if each == "one_context"])
        return super().groups(rows)
