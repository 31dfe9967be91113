"""Decides the outcome of a turn from its own reward, and rewards along the calls of an episode.

In the formulas r is the outcome as it was given, k the index of the turn (its tag `turn`), and h the number of the call
in its episode; both count from 0.

`Unshaped` to `Shaped`   find the outcome of a turn from that turn alone
`Potential`              pays for the way towards a goal; going back and forth earns nothing (Ng, Harada, Russell 1999)
`RewardToGo`             credits each call with what came after it, and not with what others had spent before
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow, LaterCalls
from flexmarl.credit.returns import own_rewards
from flexmarl.credit.shaping.base import AddedTerm, RowOutcome, Sees, by_episode
from flexmarl.credit.shaping.bonuses import descendants
from flexmarl.credit.shaping.cancelling import misfits_of
from flexmarl.credit.shaping.chains import Scope, chains_of
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, AgentName, SampleId

if TYPE_CHECKING:
    from flexmarl.credit.settings import CreditSettings


class Unshaped(RowOutcome):
    """r, unchanged: the same as no term."""

    type: Literal["none"] = "none"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward` itself."""
        return reward


class Binary(RowOutcome):
    """1 if r > threshold, else 0."""

    type: Literal["binary"] = "binary"
    threshold: float = 0.5
    """An outcome equal to it counts as 0."""

    def outcome(self, reward: float, row: CreditRow) -> float:
        """1 if `reward` is above the threshold, else 0."""
        return float(reward > self.threshold)


class Normalized(RowOutcome):
    """clip(r, -1, 1). Nothing is scaled, unlike in other projects that use this name."""

    type: Literal["normalized"] = "normalized"

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, clipped."""
        return min(max(reward, -1.0), 1.0)


class TurnWeighted(RowOutcome):
    """r (k + 1) / K: later turns count more."""

    type: Literal["turn_weighted"] = "turn_weighted"
    max_turns: int = Field(default=8, ge=1)
    """K: number of turns."""
    clip: bool = True
    """Turns after turn K count no more than turn K."""

    @property
    def first_by_last(self) -> float:
        """1 / K."""
        return 1 / self.max_turns

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`."""
        return reward * turn_weight(row, self.max_turns, clip=self.clip)


def turn_weight(row: CreditRow, max_turns: int, *, clip: bool) -> float:
    """(k + 1) / K, at most 1 with `clip`."""
    weight = (row.turn + 1) / max_turns
    return min(weight, 1.0) if clip else weight


class TurnDiscount(RowOutcome):
    """r gamma^max(0, K - 1 - k), or r gamma^max(0, K - k). Turns beyond the last are not discounted."""

    type: Literal["turn_discount"] = "turn_discount"
    max_turns: int = Field(default=8, ge=1)
    """K: number of turns."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount for each turn that could still have been taken."""
    last_undiscounted: bool = True
    """true: the first formula, in which the last turn keeps its outcome. false: the second, which discounts it too."""

    @property
    def first_by_last(self) -> float:
        """gamma^(K - 1)."""
        return self.gamma ** (self.max_turns - 1)

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`."""
        return reward * self.gamma ** max(0, self.max_turns - self.last_undiscounted - row.turn)


class HopWeighted(RowOutcome):
    """r clip((h + 1) / H, 0, 1): later calls count more. If r < 0, early calls are punished less."""

    type: Literal["hop_weighted"] = "hop_weighted"
    max_hops: int = Field(default=10, ge=1)
    """H: number of calls."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the number of the call in its episode."""
        return reward * min((row.hop + 1) / self.max_hops, 1.0)


class HopDiscount(RowOutcome):
    """r gamma^max(0, H - h): earlier calls are discounted."""

    type: Literal["hop_discount"] = "hop_discount"
    max_hops: int = Field(default=10, ge=1)
    """H: number of calls."""
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount for each call that could still have been made."""

    follows_calls: ClassVar[bool] = True

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the number of the call in its episode."""
        return reward * self.gamma ** max(0, self.max_hops - row.hop)


class Shaped(TurnWeighted):
    """clip(r (k + 1) / K, -1, 1): later turns count more, within [-1, 1]."""

    type: Literal["shaped"] = "shaped"  # pyright: ignore[reportIncompatibleVariableOverride] - each has its own

    def outcome(self, reward: float, row: CreditRow) -> float:
        """`reward`, weighted by the tag `turn`, and clipped."""
        return min(max(super().outcome(reward, row), -1.0), 1.0)


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
    """Calls whose rewards count: those that depend on this one (descendants), the agent's later ones, or all (team)."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False

    @property
    def later_calls(self) -> LaterCalls:
        """The rewards of the calls in `scope`."""
        return LaterCalls(scope=self.scope, gamma=self.gamma)

    def misfits(self, where: str, credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
        """Yields estimators that add up rewards a second time, or that compare the parts of a reward."""
        for agent in filter(self.is_for, agents):
            estimator = credit.estimator_of(agent)
            if estimator.later_calls:
                yield (
                    f"credit.{where} adds up the rewards after each call of agent '{agent}', as does its estimator, "
                    f"{estimator.type}: they would count twice; leave reward_to_go out, or use another estimator"
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
