"""Decides advantages as REINFORCE does: the reward itself, compared with nothing (Williams 1992)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from flexmarl.credit.estimators.ungrouped import Ungrouped, weighted
from flexmarl.credit.interface import Credit, CreditRow, Needs, in_order


class Reinforce(Ungrouped):
    """A = reward. Needs no other row, so that a row may be trained as soon as its own episode has ended.

    No baseline: rewards that are all positive push every sampled token up. Give rewards of both signs.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Nothing is taken off: what is always right is reinforced, too."""
        return True

    @property
    def needs(self) -> Needs:
        """Each row alone."""
        return "row"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Every row's own reward; rows without sampled tokens have weight 0."""
        ordered = in_order(rows)
        return weighted(ordered, {row.sample_id: row.reward or 0.0 for row in ordered if row.num_tokens})
