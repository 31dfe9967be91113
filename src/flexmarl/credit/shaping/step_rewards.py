"""Decides rewards along the calls of an episode: for steps towards a goal, and for what follows a call.

`Potential`    pays for the way towards a goal, so that going back and forth earns nothing (Ng, Harada, Russell 1999)
`RewardToGo`   credits each call with what came after it, and not with what others had spent before
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.returns import own_rewards
from flexmarl.credit.shaping.base import AddedTerm, Sees, by_episode
from flexmarl.credit.shaping.bonuses import descendants
from flexmarl.credit.shaping.cancelling import misfits_of
from flexmarl.credit.shaping.chains import Scope, chains_of
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, AgentName, SampleId

if TYPE_CHECKING:
    from flexmarl.credit.settings import CreditSettings


class Potential(AddedTerm):
    """gamma phi(s') - phi(s): phi is a tag of the call made in state s, and s' is the state of the next call.

    After the last call phi is 0. The discounted sum from a call on is then -phi of its state, whatever is done there,
    so no policy gains on another. This holds only if later rewards are added up, over the same calls and with the same
    discount.
    """

    type: Literal["potential"] = "potential"
    tag: str = Field(default="potential", min_length=1)
    """Tag that holds phi. The workflow gives it with `seat.act(text, potential=...)`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Must equal the discount of the returns, else loitering pays."""
    scope: Scope = "agent"
    """Next call: the agent's own (agent), or that of any agent that has the term (team)."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """True: a step may lead away from the goal."""
        return True

    def misfits(self, where: str, credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
        """Yields the reasons why phi before and after a call does not cancel (cancelling.py)."""
        return misfits_of(self, where, credit, agents)

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The difference of potentials for each call. Their sum telescopes along each chain of calls."""
        earned: dict[SampleId, float] = {}
        # A row without sampled tokens is not a step of any return.
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

    r is the reward that `reply.reward` gave an act. It is undiscounted for the act's own calls; for earlier calls it
    counts once, at the act's last call. p is what terms gave to the call itself or took from it. Z_i, the reward of the
    agent or the team, comes with the episode's last call h_e. This term reads the terms before it and must be the last.
    """

    type: Literal["reward_to_go"] = "reward_to_go"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per call in between; 1 leaves expected gradients as they are."""
    scope: Literal["descendants", "agent", "team"] = "descendants"
    """Calls whose rewards count: those that depend on this one (descendants), the agent's later ones, or all later ones
    (team)."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False
    adds_up_calls: ClassVar[bool] = True

    def misfits(self, where: str, credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
        """Yields estimators that add up rewards a second time, or that compare the parts of a reward."""
        for agent in filter(self.is_for, agents):
            estimator = credit.estimator_of(agent)
            if estimator.adds_up_calls:
                yield (
                    f"credit.{where} adds up what follows each call of agent '{agent}', and so does its estimator, "
                    f"{estimator.type}: it would count twice; leave reward_to_go out, or use another estimator"
                )
            if estimator.compares_parts:
                yield (
                    f"credit.{where} adds up all parts of the rewards that follow each call of agent '{agent}', but "
                    f"its estimator, {estimator.type}, compares them one by one; leave reward_to_go out, or use "
                    f"another estimator"
                )

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """G_i minus r_i + p_i + Z_i, which the row has already. `rows` are the rows after the other terms."""
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
