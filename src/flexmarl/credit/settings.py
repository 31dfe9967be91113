"""Settings of the `credit` section of a config: how rewards become advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import Default
from flexmarl.credit.filters import FilterDecision, OutcomeFilter
from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, Needs
from flexmarl.credit.order import ByAgent, Scope, counted, equal_shares, estimated, most, whiten
from flexmarl.credit.rows import Group
from flexmarl.credit.shaping import AnyTerm, Terms, shape
from flexmarl.credit.shaping.shape import InvalidAction
from flexmarl.errors import CreditError, boundary
from flexmarl.records import AgentName, CreditLine, FinishReason, SampleId
from flexmarl.settings import Settings


def divides_by_mean(estimator: AnyEstimator) -> bool:
    """True if the estimator divides by a mean reward, so that no reward may be negative."""
    return isinstance(estimator, GroupRelative) and estimator.scale == "mean"


class CreditSettings(Settings):
    """Steps from rewards to advantages: shape, penalise, filter, estimate, whiten, balance (credit/order.py)."""

    estimator: AnyEstimator = Default()
    """Computes advantages. `type` chooses it, and each type has its own options."""
    per_agent: Mapping[AgentName, AnyEstimator] = Field(default={})
    """Estimators of single agents. Such an estimator sees no other agent's rows."""
    shaping: Terms = ()
    """Terms that reshape the outcome or add to the reward. Each is logged as a part of the reward."""
    invalid_action: InvalidAction | None = InvalidAction()
    """Penalty for a call whose reply or tool call was not in the requested form; null is none."""
    filter: OutcomeFilter | None = OutcomeFilter()
    """Drops tasks that are not worth training on; null trains on all."""
    untrained_finish: tuple[FinishReason, ...] = ()
    """Finish reasons of turns that are not trained on, e.g. [length], so that truncated replies are not learned."""
    untrained_in_baseline: bool = False
    """Count the rewards of such turns among those that other turns are compared with."""
    whiten: Scope | None = None
    """Give the advantages of all tokens of the step, of each policy, or of each agent mean 0 and variance 1."""
    agent_balance: Literal["none", "equal"] = "none"
    """equal: each agent of a shared policy has the same share of its step, whatever its token count (token-mean)."""
    streaming: Literal["off", "linear"] = "off"
    """linear: train on-policy rows before their group is complete. This is exact, but takes memory for gradients."""
    ready: Literal["group", "trajectory"] = Field(
        default="group",
        description="When a row may be trained: when all episodes of its task have ended (group), or when its own has "
        "(trajectory), which needs an estimator of single rows, such as reinforce, and filter=null.",
    )

    @model_validator(mode="after")
    def _streams_lines(self) -> "CreditSettings":
        if self.streaming == "linear" and not self.linear:
            raise ValueError(
                f"streaming: 'linear' needs advantages that are linear in the rewards known when an episode ends, but "
                f"estimator '{getattr(self.estimator, 'type', '')}' with singleton, shaping, invalid_action, whiten or "
                f"agent_balance as given uses more; use streaming=off, or estimator.type=default, no term that "
                f"compares episodes, invalid_action.order=before, whiten=null and agent_balance=none"
            )
        return self

    @model_validator(mode="after")
    def _divisor_stays_positive(self) -> "CreditSettings":
        if self.invalid_action is None or self.invalid_action.order == "after" or not self.invalid_action.penalty:
            return self
        for where, estimator in self.estimators.items():
            if divides_by_mean(estimator):
                raise ValueError(
                    f"{where} divides by the mean reward of a group, for which no reward may be negative, but "
                    f"invalid_action subtracts {self.invalid_action.penalty:g} from rewards, which may be 0, before "
                    f"they are compared; use invalid_action.order=after, or invalid_action=null"
                )
        return self

    @model_validator(mode="after")
    def _no_term_makes_it_negative(self) -> "CreditSettings":
        for where, estimator in self.estimators.items():
            for place, term in self.terms.items() if divides_by_mean(estimator) else ():
                others = not term.agents or bool({*term.agents} - {*self.per_agent})
                meets = others if where == "estimator" else term.is_for(AgentName(where.removeprefix("per_agent.")))
                if meets and term.may_be_negative:
                    raise ValueError(
                        f"{where} divides by the mean reward of a group, for which no reward may be negative, but "
                        f"{place}, {term.name}, may make one of 0 negative; remove it, limit it with its "
                        f"`agents`, or use an estimator that does not divide by the mean, such as default"
                    )
        return self

    @property
    def needs(self) -> Needs:
        """Rows that one call of `credit` must be given: single rows, whole groups, or the whole step."""
        step_wide = self.whiten is not None or self.agent_balance == "equal"
        of_shaping: Needs = "group" if any(term.sees == "task" for term in self.shaping) else "row"
        return most((self._estimators.needs, of_shaping, "batch" if step_wide else "row"))

    @property
    def uses(self) -> frozenset[Extra]:
        """Data that rows must carry besides rewards."""
        return self._estimators.uses

    @property
    def estimators(self) -> Mapping[str, AnyEstimator]:
        """All estimators by their keys in this section, e.g. `per_agent.solver`."""
        return {"estimator": self.estimator} | {f"per_agent.{agent}": own for agent, own in self.per_agent.items()}

    @property
    def terms(self) -> Mapping[str, AnyTerm]:
        """All terms by their keys in this section, e.g. `shaping[0]`."""
        return {f"shaping[{index}]": term for index, term in enumerate(self.shaping)}

    @property
    def compares(self) -> tuple[str, ...]:
        """Keys of the settings that compare rows of several episodes."""
        estimators = [where for where, estimator in self.estimators.items() if estimator.needs != "row"]
        terms = [where for where, term in self.terms.items() if term.sees == "task"]
        step_wide = {"whiten": self.whiten is not None, "agent_balance": self.agent_balance == "equal"}
        return (*estimators, *terms, *(where for where, given in step_wide.items() if given))

    @property
    def follows_calls(self) -> tuple[str, ...]:
        """Keys of the settings that follow calls one by one, and so cannot handle a tree of turns."""
        chosen = {**self.estimators, **self.terms}
        return tuple(where for where, what in chosen.items() if getattr(what, "follows_calls", False))

    @property
    def needs_branches(self) -> tuple[str, ...]:
        """Keys of the settings that compare the candidates of a turn, and so can handle only a tree of turns."""
        chosen = {**self.estimators, **self.terms}
        return tuple(where for where, what in chosen.items() if getattr(what, "needs_branches", False))

    def estimator_of(self, agent: str) -> AnyEstimator:
        """The estimator of the agent's rows."""
        return self.per_agent.get(AgentName(agent), self.estimator)

    @property
    def key(self) -> GroupKey:
        """Tags that rows are grouped by, per agent if agents have their own estimators."""
        return self._estimators.grouping

    @property
    def linear(self) -> bool:
        """True if a group's advantages are a linear function of scores that are known before the group is complete."""
        known_early = all(term.sees != "task" for term in self.shaping)
        compared_last = self.invalid_action is None or self.invalid_action.order == "before"
        return self._estimators.linear and self.needs == "group" and known_early and compared_last

    def shape(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows of one task with their final rewards. `outcome` includes neither penalties nor terms that add."""
        shaped = shape(rows, self.shaping)
        return self.invalid_action.penalise(shaped) if self.invalid_action else shaped

    def decide(self, rows: Sequence[CreditRow]) -> tuple[FilterDecision, ...]:
        """One decision per task of the shaped rows; empty without a filter."""
        if self.filter is None:
            return ()
        seen = {row.sample_id for row in self._counted(rows) if not row.greedy}
        judged = [row if row.sample_id in seen else replace(row, num_tokens=0) for row in rows]
        return self.filter.decide(
            self._estimators.compared(judged),
            key=self.key,
            learn_from_equal=lambda agent: self.estimator_of(agent).learns_from_equal_rewards,
        )

    def credit(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages and weights of the shaped rows. `needs` says which rows one call must be given."""
        with boundary(CreditError, " and ".join(f"credit.{key}" for key in self.estimators), users_code=True):
            credit = estimated(
                rows, memory, estimator=self._estimators, untrained_in_baseline=self.untrained_in_baseline
            )
        if self.whiten is not None:
            credit = whiten(credit, rows, self.whiten)
        if self.invalid_action:
            credit = self.invalid_action.lower(credit, rows)
        return equal_shares(credit, rows) if self.agent_balance == "equal" else credit

    def open_places(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, tuple[Group, float]]:
        """Group and score c of each row of a finished episode that trains. With `lines` they determine its credit."""
        trained = {row.sample_id for row in rows if row.trains}
        places = self._estimators.open_places(self._counted(rows))
        return {sample_id: place for sample_id, place in places.items() if sample_id in trained}

    def lines(self, rows: Sequence[CreditRow]) -> Mapping[Group, CreditLine]:
        """The line A = scale c + offset of each group, and its row weight w, once all rows of its task are there."""
        return self._estimators.lines(self._counted(rows))

    def _counted(self, rows: Sequence[CreditRow]) -> list[CreditRow]:
        return counted(rows, untrained_in_baseline=self.untrained_in_baseline)

    @property
    def _estimators(self) -> ByAgent:
        return ByAgent(self.estimator, self.per_agent)
