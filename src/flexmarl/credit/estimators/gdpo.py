"""Decides advantages as GDPO does: every part of the reward is standardised by itself, then they are added up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.estimators.grouped import Scores, Singleton
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs
from flexmarl.credit.whitening import Scope, whiten


class Gdpo(GroupRelative):
    """GDPO: standardised together, different mixes of parts may get one and the same advantage; apart they do not.

    A row without parts has one, `outcome`, its reward; a part that a row lacks is 0.
    """

    type: Literal["gdpo"] = "gdpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"
    weights: Mapping[str, float] = {}
    """Weight of each part; 1 for those that are not named."""
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance in the end."""

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The weighted sum of the parts' advantages, whitened."""
        return whiten(super().estimate(rows, memory), rows, self.whiten)

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._compare, members)

    def _raw(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._raw, members)

    def _sum(self, advantages: Callable[[Sequence[CreditRow]], Scores], members: Sequence[CreditRow]) -> Scores:
        total = np.zeros(len(members))
        for name in sorted({name for row in members for name in _parts(row)}):
            of_part = advantages([replace(row, reward=_parts(row).get(name, 0.0)) for row in members])
            total += self.weights.get(name, 1.0) * of_part
        return total


def _parts(row: CreditRow) -> Mapping[str, float]:
    assert row.reward is not None, "in_order refuses rows without a reward"
    return row.parts or {"outcome": row.reward}
