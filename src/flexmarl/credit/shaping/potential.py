"""Decides what a step towards the goal earns, so that going to and fro earns nothing (Ng, Harada, Russell 1999)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import AddedTerm, Sees
from flexmarl.credit.shaping.chains import Scope, chains_of
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, SampleId


class Potential(AddedTerm):
    """gamma phi(s') - phi(s): phi is a tag of the call made in s; s' is where the next call is made.

    After the last call phi is 0. From a call on the sum is then -phi of its state, whatever is done there, so that no
    policy gains on another: but only where what follows is added up, with the same calls and the same discount.
    """

    type: Literal["potential"] = "potential"
    tag: str = Field(default="potential", min_length=1)
    """What the workflow says with `seat.act(text, potential=...)`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Must be the discount of the returns, else loitering pays."""
    scope: Scope = "agent"
    """Whose next call: the agent's own, or that of anyone the term is for."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a step leads away from the goal."""
        return True

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """Telescopes along each chain of calls."""
        earned: dict[SampleId, float] = {}
        # What was not sampled is no step of any return.
        stepped = [row for row in rows if self.is_for(row.agent) and row.num_tokens]
        for chain in chains_of(stepped, self.scope):
            levels = [*(self._level(row) for row in chain), 0.0]
            for row, level, following in zip(chain, levels, levels[1:], strict=False):
                earned[row.sample_id] = self.gamma * following - level
        return earned

    def _level(self, row: CreditRow) -> float:
        level = float(row.number(self.tag))
        if not abs(level) <= LARGEST_REWARD:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has {self.tag} {level:g}; a potential must be finite, "
                f"and at most {LARGEST_REWARD:g}, as rewards are"
            )
        return level
