"""Decides the credit of rows, in a fixed order: shape, penalise, filter, estimate, whiten, balance.

  rows of a task ──► shape ──► penalise ──► decide
                                            ╰──► rows of whole groups ──► estimate ──► whiten ──► (penalise) ──► balance

Rows that do not train get weight 0 before anything is whitened or balanced. Padding, packing and splitting come after
the last step.

`estimated`      makes advantages and weights of rows, with a check that they are finite
`ByAgent`        chooses the estimator of a row: its agent's own, or the one of all other agents
`whiten`         gives advantages mean 0 and variance 1 over all sampled tokens (docs/math.md section 5)
`equal_shares`   gives the agents of a shared policy equal shares of its step (docs/math.md section 5)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.interface import (
    AgentReport,
    Credit,
    CreditRow,
    Estimator,
    Extra,
    GroupKey,
    Needs,
    Tokens,
    in_order,
)
from flexmarl.credit.rows import Group
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, AgentName, CreditLine, PolicyName, SampleId

Scope = Literal["batch", "policy", "agent"]
"""Tokens that share one mean and variance: all of the step, a policy's, or an agent's."""

EPS = 1e-8
TOO_FEW = "not whitened: fewer than 2 sampled tokens have no variance"


def whiten(credit: Credit, rows: Sequence[CreditRow], scope: Scope) -> Credit:
    """The credit with whitened advantages for rows that train and have a weight. Returns are not whitened.

    A scope with fewer than two tokens gets advantage 0, and its agent's report notes it.
    """
    blocks: dict[str, list[CreditRow]] = {}
    for row in in_order(rows):
        if row.num_tokens and row.trains and not row.greedy and credit.weights.get(row.sample_id):
            blocks.setdefault("" if scope == "batch" else str(row.tag(scope)), []).append(row)
    advantages, tokens, report = dict(credit.advantages), dict(credit.token_advantages), dict(credit.report)
    for members in blocks.values():
        found = whitened(np.concatenate([_tokens_of(row, credit) for row in members]))
        for row, of_row in zip(members, _split(found, members), strict=True):
            advantages[row.sample_id] = float(of_row[0])
            if row.sample_id in tokens:
                tokens[row.sample_id] = Tokens(of_row.tolist())
                advantages[row.sample_id] = float(of_row.mean())
        if len(found) < 2:
            agent = members[0].agent
            report[agent] = report.get(agent, AgentReport()) + AgentReport(notes=(TOO_FEW,))
    return replace(credit, advantages=advantages, token_advantages=tokens, report=report)


def whitened(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(x - mean) / sqrt(var + 1e-8), with the variance over N - 1. All 0 for equal numbers or a single one.

    >>> whitened(np.array([1.0, 2.0, 3.0])).round(4).tolist()
    [-1.0, 0.0, 1.0]
    """
    # The 1e-8 in the mean makes equal numbers differ from it, and dividing by 1e-4 would magnify the difference.
    if len(x) < 2 or x.min() == x.max():
        return np.zeros_like(x)
    n = len(x)
    centred = x - x.sum() / (n + EPS)
    variance = (centred**2).sum() / (n + EPS) * n / (n - 1)
    return centred / np.sqrt(variance + EPS)


def _tokens_of(row: CreditRow, credit: Credit) -> NDArray[np.float64]:
    tokens = credit.token_advantages.get(row.sample_id)
    return np.full(row.num_tokens, credit.advantages[row.sample_id]) if tokens is None else np.array(tokens, np.float64)


def _split(x: NDArray[np.float64], rows: Sequence[CreditRow]) -> list[NDArray[np.float64]]:
    return np.split(x, np.cumsum([row.num_tokens for row in rows])[:-1])


def equal_shares(credit: Credit, rows: Sequence[CreditRow]) -> Credit:
    """The credit with each weight w_i multiplied by N / (K N_agent), for a policy of K agents with N tokens in total.

    The token-mean is then the mean over agents of each agent's token-mean, and N_tok is still N. A policy with one
    agent keeps its weights.
    """
    tokens: dict[PolicyName, dict[AgentName, float]] = defaultdict(lambda: defaultdict(float))
    for row in in_order(rows):
        weighted = credit.weights[row.sample_id] * row.num_tokens
        if weighted:
            tokens[row.policy][row.agent] += weighted
    weights = dict(credit.weights)
    for row in rows:
        if weights[row.sample_id]:
            of_agents = tokens[row.policy]
            weights[row.sample_id] *= sum(of_agents.values()) / (len(of_agents) * of_agents[row.agent])
    return replace(credit, weights=weights)


ORDER_OF_NEEDS: tuple[Needs, ...] = ("row", "group", "batch", "state")


def most(needs: Iterable[Needs]) -> Needs:
    """The need that covers the most rows."""
    return ORDER_OF_NEEDS[max(map(ORDER_OF_NEEDS.index, needs))]


class ByAgent:
    """Several estimators used as one. Rows of agents with different estimators are never compared."""

    def __init__(self, others: Estimator, per_agent: Mapping[AgentName, Estimator]) -> None:
        self._others = others
        self._per_agent = per_agent

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """The common estimator, and those of single agents."""
        return (self._others, *self._per_agent.values())

    @property
    def needs(self) -> Needs:
        """The largest need of any estimator."""
        return most(estimator.needs for estimator in self.estimators)

    @property
    def uses(self) -> frozenset[Extra]:
        """Everything that any estimator uses."""
        return frozenset[Extra]().union(*(estimator.uses for estimator in self.estimators))

    @property
    def key(self) -> GroupKey:
        """The same as `grouping`."""
        return self.grouping

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if any estimator does."""
        return any(estimator.learns_from_equal_rewards for estimator in self.estimators)

    @property
    def grouping(self) -> GroupKey:
        """One key for all agents, or a key per agent if some have their own estimators."""
        others = self._others.grouping
        if not self._per_agent:
            return others
        keys = {"*": others} if isinstance(others, tuple) else dict(others)
        for agent, estimator in self._per_agent.items():
            key = estimator.grouping
            keys[agent] = key if isinstance(key, tuple) else key.get(agent, key.get("*", ()))
        return keys

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows as their estimators compare them: most keep their reward, c3 replaces it. Ordered by estimator."""
        return [row for _, estimator, share in self._shares(rows) for row in estimator.compared(share)]

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Each row's credit by its estimator. Rows of a greedy play go only to estimators that use them."""
        whole = Credit(advantages={}, weights={}, report={}, memory=memory)
        for _, estimator, share in self._shares(rows):
            seen = [row for row in share if not row.greedy or "greedy" in estimator.uses]
            whole = _joined(whole, estimator.estimate(seen, memory), before=memory)
        return whole

    @property
    def linear(self) -> bool:
        """True if every estimator's advantages are a linear function of scores known before a group is complete."""
        return all(isinstance(estimator, GroupRelative) and estimator.linear for estimator in self.estimators)

    def open_places(self, rows: Sequence[CreditRow]) -> dict[SampleId, tuple[Group, float]]:
        """Group and score of every sampled row. Call it only if `linear`."""
        return {
            sample_id: (whose + group, score)
            for whose, estimator, share in self._shares(rows)
            if isinstance(estimator, GroupRelative)
            for sample_id, (group, score) in estimator.open_places(share).items()
        }

    def lines(self, rows: Sequence[CreditRow]) -> dict[Group, CreditLine]:
        """The line from scores to advantages of each complete group. Call it only if `linear`."""
        return {
            whose + group: line
            for whose, estimator, share in self._shares(rows)
            if isinstance(estimator, GroupRelative)
            for group, line in estimator.lines(share).items()
        }

    def _shares(self, rows: Sequence[CreditRow]) -> Iterator[tuple[Group, Estimator, Sequence[CreditRow]]]:
        """Yields, for each estimator that has rows: a prefix of its groups' names, the estimator, and its rows."""
        others = [row for row in rows if row.agent not in self._per_agent]
        if others:
            yield (), self._others, others
        for agent, estimator in self._per_agent.items():
            own = [row for row in rows if row.agent == agent]
            if own:
                yield (("estimator", agent),), estimator, own


def _joined(whole: Credit, part: Credit, *, before: Mapping[str, float]) -> Credit:
    changed = {name: value for name, value in part.memory.items() if before.get(name) != value}
    return Credit(
        advantages={**whole.advantages, **part.advantages},
        weights={**whole.weights, **part.weights},
        report={**whole.report, **part.report},
        token_advantages={**whole.token_advantages, **part.token_advantages},
        returns={**whole.returns, **part.returns},
        memory={**whole.memory, **changed},
    )


LARGEST_CREDITED = 1e6 * LARGEST_REWARD
"""Bound on a reward after all terms. It allows the sum over a million calls, and squares are far from overflow."""


def counted(rows: Sequence[CreditRow], *, untrained_in_baseline: bool) -> list[CreditRow]:
    """The rows that others are compared with, and those of a greedy play, for estimators that use them."""
    return [row for row in rows if row.greedy or row.trains or untrained_in_baseline]


def estimated(
    rows: Sequence[CreditRow], memory: Mapping[str, float], *, estimator: Estimator, untrained_in_baseline: bool
) -> Credit:
    """An advantage and a weight for every row; both 0 for greedy rows, and for those whose `trains` is False.

    Raises CreditError for a reward that is too large, or an advantage that is not finite.
    """
    _check_size(rows)
    credit = estimator.estimate(counted(rows, untrained_in_baseline=untrained_in_baseline), memory)
    _check_finite(credit, rows)
    nothing = {row.sample_id: 0.0 for row in rows if row.greedy or not row.trains}
    report = dict(credit.report)
    untrained = Counter(row.agent for row in rows if not row.trains)
    for agent in dict.fromkeys(row.agent for row in rows):
        seen = report.get(agent, AgentReport())
        report[agent] = seen + AgentReport(untrained=untrained[agent]) if untrained[agent] else seen
    return replace(
        credit,
        advantages={**credit.advantages, **nothing},
        weights={**credit.weights, **nothing},
        report=report,
        token_advantages={name: tokens for name, tokens in credit.token_advantages.items() if name not in nothing},
        returns={name: tokens for name, tokens in credit.returns.items() if name not in nothing},
    )


def _check_size(rows: Sequence[CreditRow]) -> None:
    for row in rows:
        if row.reward is not None and abs(row.reward) > LARGEST_CREDITED:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has reward {row.reward:g} after all terms; it must be at "
                f"most {LARGEST_CREDITED:g}, else what it is compared with is lost: give rewards on a smaller scale"
            )


def _check_finite(credit: Credit, rows: Sequence[CreditRow]) -> None:
    for row in rows:
        found = (credit.advantages.get(row.sample_id, 0.0), *credit.token_advantages.get(row.sample_id, ()))
        if not all(map(math.isfinite, found)):
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has reward {row.reward} and an advantage that is not "
                f"finite; rewards, the tags that terms read and the settings of terms must be smaller"
            )
