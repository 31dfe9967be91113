"""Decides outcomes that say how a turn compares with those before it, and how its chain ended."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given
from flexmarl.credit.shaping.chains import Scope, compared
from flexmarl.credit.shaping.margin import margin
from flexmarl.records import SampleId


class MarginWithOutcome(OutcomeTerm):
    """`margin` + b r_last on every turn."""

    type: Literal["margin_with_outcome"] = "margin_with_outcome"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    beta: float = Field(default=0.5, ge=0)
    """b."""
    scope: Scope = "agent"
    """Whose turns: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn is worse than those before it."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: margin(given(row), chain[row.sample_id].mean, self.alpha)
            + self.beta * chain[row.sample_id].last
            for row in rows
        }
