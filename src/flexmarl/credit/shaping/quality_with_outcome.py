"""Decides outcomes that reward a turn for mending what is wrong, and for how its chain ended."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees
from flexmarl.credit.shaping.chains import Scope, compared
from flexmarl.credit.shaping.quality import quality
from flexmarl.records import SampleId


class QualityWithOutcome(OutcomeTerm):
    """`quality` + b r_last on every turn."""

    type: Literal["quality_with_outcome"] = "quality_with_outcome"
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
        """Where a turn stands by what is wrong."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`. Raises CreditError for an outcome outside [0, 1]."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: quality(row, chain[row.sample_id].mean, self.alpha) + self.beta * chain[row.sample_id].last
            for row in rows
        }
