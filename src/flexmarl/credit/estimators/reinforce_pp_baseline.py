"""Decides advantages as REINFORCE++-baseline does: centred in the group, then whitened over the step."""

from collections.abc import Mapping, Sequence
from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs
from flexmarl.credit.whitening import Scope, whiten


class ReinforcePPBaseline(GroupRelative):
    """REINFORCE++-baseline (arXiv 2501.03262): one scale for all groups, instead of each group's own deviation."""

    type: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance; the paper has one policy, and takes the batch."""

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages, whitened."""
        return whiten(super().estimate(rows, memory), rows, self.whiten)
