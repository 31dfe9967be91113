"""Decides outcomes that say how a turn compares with those before it."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given
from flexmarl.credit.shaping.chains import Scope, compared
from flexmarl.records import SampleId


class Margin(OutcomeTerm):
    """r_t + a (r_t - Q_t), where Q_t is the mean of the turns before; a first turn is unchanged."""

    type: Literal["margin"] = "margin"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    scope: Scope = "agent"
    """Whose turns before: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn is worse than those before it."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`."""
        before = compared(rows, self.scope)
        return {row.sample_id: margin(given(row), before[row.sample_id].mean, self.alpha) for row in rows}


def margin(reward: float, before: float | None, alpha: float) -> float:
    """r_t + a (r_t - Q_t).

    >>> margin(1.0, 0.5, alpha=0.5), margin(1.0, None, alpha=0.5)
    (1.25, 1.0)
    """
    return reward if before is None else reward + alpha * (reward - before)
