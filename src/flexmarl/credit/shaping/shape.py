"""Decides the final reward of every turn of a task: its outcome, the terms that add to it, and the penalty of its call.

  reward     = outcome' + the workflow's other parts + terms that add
  outcome    = outcome', the outcome after a term reshaped it; filters look at it
  parts      = {the given outcome, the workflow's other parts, the change by each term}: they add up to the reward
  objectives = {outcome', the workflow's other parts}, and
  prices     = {each term that adds}: together they add up to the reward, too
  act_reward, call_reward: the shares of the reward that belong to the act and to the call itself

Every term reads the rewards as the workflow gave them, so the order of terms does not matter. Only `reward_to_go`,
which must be the last, reads the rewards after the other terms.

`InvalidAction` is the price c of a call whose reply or tool call was not in the requested form:

`before`   r_i -= c before rows are compared. With centring alone, no advantage changes by more than c. With division by
           the standard deviation, c becomes an advantage of order 1 in a group that is otherwise constant, however
           small c is; give the estimator a `std_floor` then.
`after`    A_i -= c: the penalty is neither compared nor scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from flexmarl.credit.interface import Credit, CreditRow
from flexmarl.credit.shaping.base import AddedTerm, AnyTerm, OutcomeTerm, given
from flexmarl.credit.shaping.outcomes import RewardToGo
from flexmarl.errors import CreditError, boundary
from flexmarl.records import AgentName
from flexmarl.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Mean reward of one agent's rewarded turns, part by part."""

    turns: int
    means: Mapping[str, float]
    """Mean of each part. They add up to the mean reward."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """Its fields, by name."""
        return {"turns": self.turns, "means": self.means}


def reward_parts(rows: Sequence[CreditRow]) -> Mapping[AgentName, RewardParts]:
    """Reward parts by agent, from rows with their final rewards. Rows of a greedy play are not counted."""
    by_agent: dict[AgentName, list[Mapping[str, float]]] = {}
    for row in rows:
        if row.reward is not None and not row.greedy:
            by_agent.setdefault(row.agent, []).append(row.parts or {"outcome": row.reward})
    return {agent: RewardParts(turns=len(parts), means=_means(parts)) for agent, parts in by_agent.items()}


def _means(turns: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Mean of each part. A part that a turn lacks counts as 0."""
    names = dict.fromkeys(name for parts in turns for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in turns) / len(turns) for name in names}


PART = "invalid_action"


class InvalidAction(Settings):
    """A penalty for each call that was not valid."""

    penalty: float = Field(default=0.1, ge=0)
    """c: the penalty of one call."""
    order: Literal["before", "after"] = "before"
    """before: taken from the reward before rows are compared, as a part of it. after: taken from the advantage."""

    def penalise(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The shaped rows. If `order` is before, the penalty is in their rewards; outcomes do not change."""
        return rows if self.order == "after" else [self._penalised(row) for row in rows]

    def lower(self, credit: Credit, rows: Sequence[CreditRow]) -> Credit:
        """The credit of these rows. If `order` is after, the penalty is taken from their advantages."""
        costs = {row.sample_id: 0.0 if row.valid else self.penalty for row in rows}
        if self.order == "before" or not any(costs.values()):
            return credit
        return replace(
            credit,
            advantages={
                name: advantage - costs[name] if credit.weights[name] else advantage
                for name, advantage in credit.advantages.items()
            },
            token_advantages={
                name: tuple(advantage - costs[name] for advantage in tokens)
                for name, tokens in credit.token_advantages.items()
            },
        )

    def _penalised(self, row: CreditRow) -> CreditRow:
        if row.reward is None:
            return row
        return row.pays(PART, 0.0 if row.valid else self.penalty)


def shape(rows: Sequence[CreditRow], terms: Sequence[AnyTerm]) -> Sequence[CreditRow]:
    """The rows of one task with their final rewards. A row without a reward does not change."""
    rewarded = sorted((row for row in rows if row.reward is not None), key=lambda row: (row.episode, row.hop))
    sums = {row.sample_id: _Sum(row, given(row)) for row in rewarded}
    for index, term in enumerate(terms):
        seen = [sums[row.sample_id].row_now() for row in rewarded] if isinstance(term, RewardToGo) else rewarded
        with boundary(CreditError, f"credit.shaping[{index}] ({term.name})", users_code=True):
            changes = term.outcomes(seen) if isinstance(term, OutcomeTerm) else term.added(seen)
        for sample_id, value in changes.items():
            if term.is_for(sums[sample_id].row.agent):
                sums[sample_id].take(term, value)
    return [sums[row.sample_id].row_now() if row.sample_id in sums else row for row in rows]


def check_terms(terms: Sequence[AnyTerm]) -> Sequence[AnyTerm]:
    """Returns the terms.

    Raises ValueError if two terms replace the same agent's outcome, or if `reward_to_go` is not the last.
    """
    for index, term in enumerate(terms):
        if isinstance(term, RewardToGo) and index < len(terms) - 1:
            raise ValueError(f"reward_to_go comes before {terms[index + 1].name}, but reads it; put it last")
        for other in terms[:index]:
            if isinstance(term, OutcomeTerm) and isinstance(other, OutcomeTerm) and (shared := _shared(term, other)):
                raise ValueError(
                    f"{other.name} and {term.name} both replace the outcome of {shared}; "
                    f"use one of them, or limit each with `agents`"
                )
    return terms


def _shared(one: AnyTerm, other: AnyTerm) -> str:
    """An agent whose turns get both terms; empty if there is none."""
    named = [*one.agents, *other.agents]
    return next((agent for agent in named if one.is_for(agent) and other.is_for(agent)), "" if named else "every agent")


@dataclass(slots=True)
class _Sum:
    """The reward of one row while terms are applied to it."""

    row: CreditRow
    """The row with the reward that the workflow gave."""
    outcome: float
    reshaped: bool = False
    """True once a term has replaced the outcome, even by an equal one."""
    terms: dict[str, float] = field(default_factory=dict)
    """Change of the reward by each term."""
    prices: dict[str, float] = field(default_factory=dict)
    """Amount from each term that adds."""
    call_reward: float = 0.0

    def take(self, term: AnyTerm, value: float) -> None:
        """Applies a term: `value` is the new outcome, or the amount that it adds."""
        change = value
        if isinstance(term, AddedTerm):
            self.prices[term.name] = self.prices.get(term.name, 0.0) + value
            self.call_reward += value if term.of_call else 0.0
        else:
            change, self.outcome, self.reshaped = value - given(self.row), value, True
        self.terms[term.name] = self.terms.get(term.name, 0.0) + change

    def row_now(self) -> CreditRow:
        """The row with the terms that were applied so far."""
        row, before = self.row, given(self.row)
        if not self.terms:
            return row
        assert row.reward is not None
        parts = dict(row.parts) or {"outcome": row.reward}
        for name, change in self.terms.items():
            parts[name] = parts.get(name, 0.0) + change
        return replace(
            row,
            reward=self.outcome + (row.reward - before) + sum(self.prices.values()),
            outcome=self.outcome,
            act_reward=row.act_reward + _of_act(row, self.outcome - before),
            call_reward=row.call_reward + self.call_reward,
            parts=parts,
            objectives=_asked(row, self.outcome if self.reshaped else None),
            prices=self.prices,
        )


def _of_act(row: CreditRow, change: float) -> float:
    """The act's share of a change of the outcome, which is its share of the outcome."""
    if row.act_outcome is None:
        return 0.0
    return change * row.act_outcome / given(row) if given(row) else change


def _asked(row: CreditRow, reshaped: float | None) -> Mapping[str, float]:
    """The row's objectives, with the reshaped outcome. Without a part `outcome`, the whole reward was reshaped."""
    asked = row.objectives or row.parts or {"outcome": given(row)}
    if reshaped is None:
        return asked
    return {**(asked if "outcome" in asked else {}), "outcome": reshaped}
