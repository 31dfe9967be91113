"""Decides what a step towards the goal earns, so that going to and fro earns nothing (Ng, Harada, Russell 1999)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import AddedTerm, Sees
from flexmarl.credit.shaping.chains import Scope, chains_of
from flexmarl.records import SampleId


class Potential(AddedTerm):
    """gamma phi(s') - phi(s): phi is a tag of the call made in s; s' is where the next call is made.

    After the last call phi is 0. The sum over an episode is then -phi of its first state, whatever was done, so that
    no policy gains on another: but only if gamma is the discount of the returns.
    """

    type: Literal["potential"] = "potential"
    tag: str = Field(default="potential", min_length=1)
    """What the workflow says with `seat.act(text, potential=...)`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Must be the discount that the estimator's returns have; 1 for those without one, else loitering pays."""
    scope: Scope = "agent"
    """Whose next call: the agent's own, or that of anyone the term is for."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """Telescopes along each chain of calls."""
        earned: dict[SampleId, float] = {}
        for chain in chains_of([row for row in rows if self.is_for(row.agent)], self.scope):
            levels = [*(float(row.tag(self.tag)) for row in chain), 0.0]
            for row, level, following in zip(chain, levels, levels[1:], strict=False):
                earned[row.sample_id] = self.gamma * following - level
        return earned
