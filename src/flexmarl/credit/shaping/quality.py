"""Decides outcomes that reward a turn for standing by what is right and for mending what is wrong."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given
from flexmarl.credit.shaping.chains import Scope, compared
from flexmarl.errors import CreditError
from flexmarl.records import SampleId


class Quality(OutcomeTerm):
    """r_t + a (Q_t r_t - (1 - Q_t)(1 - r_t)), where Q_t is the mean of the turns before; a first turn is unchanged."""

    type: Literal["quality"] = "quality"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    scope: Scope = "agent"
    """Whose turns before: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn stands by what is wrong."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`. Raises CreditError for an outcome outside [0, 1]."""
        before = compared(rows, self.scope)
        return {row.sample_id: quality(row, before[row.sample_id].mean, self.alpha) for row in rows}


def quality(row: CreditRow, before: float | None, alpha: float) -> float:
    """The outcome of one row."""
    reward = given(row)
    if not 0 <= reward <= 1:
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has outcome {reward}; `quality` needs outcomes in [0, 1], "
            f"use `margin` for others"
        )
    return reward if before is None else reward + alpha * (before * reward - (1 - before) * (1 - reward))
