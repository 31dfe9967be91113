"""Decides advantages against a critic: the rewards that followed a step, minus the value that was expected.

The steps of `Gae` are tokens, as in PPO; those of `StepGae` are whole calls of an episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.estimators.base import Ungrouped, tokens_of, weighted
from flexmarl.credit.interface import Credit, CreditRow, Extra, LaterCalls, Needs, in_order
from flexmarl.credit.order import Scope, whiten
from flexmarl.credit.returns import Steps, generalised_advantages, own_rewards, token_rewards, token_values
from flexmarl.records import SampleId


class _AgainstACritic(Ungrouped):
    """Reads a critic's values as the rewards that were expected."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True: the critic may have expected other rewards."""
        return True

    @property
    def uses(self) -> frozenset[Extra]:
        """A critic's values."""
        return frozenset[Extra]({"values"})


class Gae(_AgainstACritic):
    """Generalised advantages (arXiv 1506.02438) over the tokens of each turn, then whitened, unlike the returns."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """1: the whole return, minus the value; 0: the next token's value replaces all that follows."""
    whiten: Scope = "policy"
    """Tokens that share one mean and variance."""

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages per token. The returns, which the critic learns, are advantage plus value."""
        ordered = in_order(rows)
        sampled = [row for row in ordered if row.num_tokens]
        values = {row.sample_id: token_values(row) for row in sampled}
        found = {
            row.sample_id: generalised_advantages(
                token_rewards(row), values[row.sample_id], gamma=self.gamma, lam=self.lam
            )
            for row in sampled
        }
        credit = replace(
            weighted(ordered, {sample_id: float(of_row.mean()) for sample_id, of_row in found.items()}),
            token_advantages=tokens_of(found),
            returns=tokens_of({sample_id: of_row + values[sample_id] for sample_id, of_row in found.items()}),
        )
        return whiten(credit, rows, self.whiten)


class StepGae(_AgainstACritic):
    """Generalised advantages with calls as steps, as in MAPPO (arXiv 2103.01955).

    r_k   the reward of call k itself, and that of its act if it is the act's last call. The reward of its agent or of
          the team comes after the last call of all
    V_k   the critic's value at the first sampled token of call k
    A_k   r_k + gamma V_next - V_k + gamma lam A_next, for every token of call k
    """

    follows_calls: ClassVar[bool] = True
    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["step_gae"] = "step_gae"
    scope: Literal["team", "agent"] = "team"
    """Next call: the team's next one, or the same agent's. With team, the next agent's critic stands for all that
    follows, and it expects that agent's reward: give the team one reward."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per call."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """1: the whole return, minus the value; 0: the next call's value replaces all that follows."""

    @property
    def later_calls(self) -> LaterCalls:
        """The rewards of the calls in `scope`."""
        return LaterCalls(scope=self.scope, gamma=self.gamma, lam=self.lam)

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """One advantage and one return per call. The critic learns the return at all tokens of the call."""
        ordered = in_order(rows)
        chains: dict[tuple[str, ...], list[CreditRow]] = {}
        for row in ordered:
            if row.num_tokens:
                scope = (row.task, row.episode, *([row.agent] if self.scope == "agent" else []))
                chains.setdefault(scope, []).append(row)
        advantages: dict[SampleId, float] = {}
        returns: dict[SampleId, Steps] = {}
        for calls in chains.values():
            values = np.array([token_values(row)[0] for row in calls])
            for row, advantage, value in zip(calls, self._advantages(calls, values), values, strict=True):
                advantages[row.sample_id] = float(advantage)
                returns[row.sample_id] = np.full(row.num_tokens, advantage + value)
        return replace(weighted(ordered, advantages), returns=tokens_of(returns))

    def _advantages(self, calls: Sequence[CreditRow], values: Steps) -> Steps:
        # A reward after the last call adds (gamma lam)^(calls in between) times itself. Each row has its own.
        reach = (self.gamma * self.lam) ** np.arange(len(calls) - 1, -1, -1)
        shares = np.array([row.shared_reward for row in calls])
        return generalised_advantages(own_rewards(calls), values, gamma=self.gamma, lam=self.lam) + reach * shares
