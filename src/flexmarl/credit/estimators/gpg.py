"""Decides advantages as GPG does: centred, and larger the more rewards of the step are 0."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.grouped import Singleton
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs


class Gpg(GroupRelative):
    """GPG (arXiv 2504.02546): A = alpha (r - mean), alpha = rows of the step / those with an outcome other than 0.

    The outcome, and not the reward: else a price of a millionth would turn every failure into a row that counts.
    """

    type: Literal["gpg"] = "gpg"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"

    @property
    def needs(self) -> Needs:
        """The whole step, whose rewards are counted."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages times alpha."""
        credit = super().estimate(rows, memory)
        outcomes = [row.reward if row.outcome is None else row.outcome for row in rows if row.num_tokens]
        alpha = len(outcomes) / max(sum(map(bool, outcomes)), 1)
        return replace(credit, advantages={name: alpha * value for name, value in credit.advantages.items()})
