"""Decides advantages as GDPO does: it standardises every objective separately, then adds them up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from flexmarl.credit.estimators.base import Scores, Singleton
from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs
from flexmarl.credit.order import Scope, whiten


class Gdpo(GroupRelative):
    """GDPO: standardised separately, different mixes of parts get different advantages; together they may get the same.

        A = whitened(sum over objectives of weight x standardised) + sum over prices of weight x (price - group's mean)

    Objectives are the outcome, as reshaped by a term, and the workflow's other parts; one that a row lacks counts as 0.
    Prices are what settings add or take (penalties, bonuses, a divergence). They keep the size that the setting gives
    them: standardised, a price of a millionth would weigh as much as the outcome.
    """

    type: Literal["gdpo"] = "gdpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"
    weights: Mapping[str, float] = {}
    """Weight of each part by name; a price has the name of its term. Parts that are not named have weight 1."""
    whiten: Scope = "policy"
    """Tokens that share one mean and variance in the end."""

    compares_parts: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The weighted sum of the objectives' advantages, whitened, plus the centred prices."""
        credit = whiten(super().estimate(rows, memory), rows, self.whiten)
        paid = self._unscaled.estimate([replace(row, reward=self._price(row)) for row in rows]).advantages
        return replace(credit, advantages={name: value + paid[name] for name, value in credit.advantages.items()})

    @property
    def _unscaled(self) -> GroupRelative:
        """Estimator that centres prices in their group without scaling them."""
        same = {name: getattr(self, name) for name in ("key", "require", "unit", "centre", "singleton")}
        return GroupRelative.model_validate(same)

    def _price(self, row: CreditRow) -> float:
        return sum(self.weights.get(name, 1.0) * price for name, price in row.prices.items())

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._compare, members)

    def _raw(self, members: Sequence[CreditRow]) -> Scores:
        return self._sum(super()._raw, members)

    def _sum(self, advantages: Callable[[Sequence[CreditRow]], Scores], members: Sequence[CreditRow]) -> Scores:
        total = np.zeros(len(members))
        for name in sorted({name for row in members for name in _objectives(row)}):
            of_part = advantages([replace(row, reward=_objectives(row).get(name, 0.0)) for row in members])
            total += self.weights.get(name, 1.0) * of_part
        return total


def _objectives(row: CreditRow) -> Mapping[str, float]:
    assert row.reward is not None, "in_order refuses rows without a reward"
    return row.objectives or row.parts or {"outcome": row.reward}
