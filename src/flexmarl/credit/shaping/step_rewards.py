"""Decides what a step towards the goal earns, so that going to and fro earns nothing (Ng, Harada, Russell 1999).

Decides what each call is credited with: what came after it, and not what others had spent before.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.returns import own_rewards
from flexmarl.credit.shaping.base import AddedTerm, Sees, by_episode
from flexmarl.credit.shaping.bonuses import descendants
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


class RewardToGo(AddedTerm):
    """G_i = r_i + p_i + sum over scope(i) of gamma^(h_j - h_i) (p_j + r_j) + gamma^(h_e - h_i) Z_i.

    r is what `reply.reward` gave an act: undiscounted for the act's own calls, and once, at the last call of the act,
    for calls before it. p is what terms gave or took from the very call. Z_i, what was given to the agent or to the
    team, comes with the episode's last call h_e. Reads the terms before it, and must be the last.
    """

    type: Literal["reward_to_go"] = "reward_to_go"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """For each call in between; 1 leaves expected gradients as they are."""
    scope: Literal["descendants", "agent", "team"] = "descendants"
    """Whose rewards follow: those of calls that depend on this one, of the agent's later calls, or of all later
    calls."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """What G_i is beyond r_i + p_i + Z_i, which the row has already. Rows as they are after the other terms."""
        earned: dict[SampleId, float] = {}
        for played in by_episode(rows).values():
            calls = played[0].calls
            later = descendants(calls)
            last = max((call.hop for call in calls), default=played[-1].hop)
            own = own_rewards(played).tolist()
            for row in played:
                to_come = sum(
                    self.gamma ** (other.hop - row.hop) * (other.call_reward if other.act == row.act else reward)
                    for other, reward in zip(played, own, strict=True)
                    if self._counts(other, row, later)
                )
                earned[row.sample_id] = to_come + (self.gamma ** (last - row.hop) - 1) * row.shared_reward
        return earned

    def _counts(self, other: CreditRow, row: CreditRow, later: Mapping[int, frozenset[int]]) -> bool:
        match self.scope:
            case "descendants":
                return other.hop in later.get(row.hop, ())
            case "agent":
                return other.hop > row.hop and other.agent == row.agent
            case "team":
                return other.hop > row.hop
