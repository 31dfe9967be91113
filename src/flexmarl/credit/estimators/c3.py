"""Decides advantages on a tree of turns: the reward that follows a turn, against that of its siblings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.estimators.base import Grouped, Scores, rewards_of
from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, in_order
from flexmarl.credit.rows import Requirement, means_of_acts, places_of_acts
from flexmarl.errors import CreditError
from flexmarl.records import SampleId, Scalar


class C3(Grouped):
    """C3: leave-one-out over siblings. Siblings are acts that were sampled from one node of a tree and share a prompt.

        q   mean reward of the leaves at and below the turn        Q   mean of the critic's values in the act's calls
        reward_only      q - LOO(q)
        value_only       Q - LOO(Q)
        value_assisted   q - [(1 - alpha) LOO(q) + alpha LOO(Q)]       LOO: mean of the other siblings

    All calls of an act get its advantage. The critic learns to expect q at every token of the turn.

    It reads two columns: `branch`, the node that a row was sampled from, and `path`, the number of the candidate at
    each turn from the root to the row.
    """

    type: Literal["c3"] = "c3"
    key: GroupKey = ("task", "episode", "branch")
    require: tuple[Requirement, ...] = ("one_task", "one_context")
    tree: tuple[str, ...] = ("task", "episode")
    """Columns that identify the tree of a path."""
    signal: Literal["reward_only", "value_only", "value_assisted"] = "reward_only"
    """Formula of the advantage; those with values need a critic."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """Share of the critic in the baseline of `value_assisted`."""

    @property
    def needs_branches(self) -> bool:
        """True: siblings are the candidates of a turn."""
        return True

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True with a critic, which may expect more of one sibling than of another."""
        return self.signal != "reward_only"

    @property
    def uses(self) -> frozenset[Extra]:
        """A critic's values, unless only rewards are compared."""
        return frozenset() if self.signal == "reward_only" else frozenset({"values"})

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages of siblings, and with a critic the returns that it learns."""
        compared = self.compared(rows)
        credit = super().estimate(compared)
        if self.signal == "reward_only":
            return credit
        return replace(
            credit, returns={row.sample_id: (row.reward or 0.0,) * row.num_tokens for row in compared if row.num_tokens}
        )

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with q as their reward, and with the mean outcome of their leaves as their outcome."""
        sampled = [row for row in in_order(rows) if row.num_tokens]
        rewards = self._means_below(sampled, lambda row: row.reward or 0.0)
        outcomes = self._means_below(sampled, lambda row: (row.reward or 0.0) if row.outcome is None else row.outcome)
        return [
            replace(row, reward=rewards[row.sample_id], outcome=outcomes[row.sample_id]) if row.num_tokens else row
            for row in super().compared(rows)
        ]

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Number of siblings."""
        return len(places_of_acts(members))

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        q, act_of_row = means_of_acts(members, rewards_of(members))
        if self.signal == "reward_only":
            return (q - _others(q))[act_of_row]
        values, _ = means_of_acts(members, np.array([_value(row) for row in members]))
        if self.signal == "value_only":
            return (values - _others(values))[act_of_row]
        return (q - ((1 - self.alpha) * _others(q) + self.alpha * _others(values)))[act_of_row]

    def _means_below(self, rows: Sequence[CreditRow], of: Callable[[CreditRow], float]) -> dict[SampleId, float]:
        trees: dict[tuple[Scalar, ...], list[tuple[tuple[int, ...], CreditRow]]] = {}
        for row in rows:
            trees.setdefault(tuple(row.tag(tag) for tag in self.tree), []).append((row.node, row))
        means: dict[SampleId, float] = {}
        for tree in trees.values():
            inner = {path[:length] for path, _ in tree for length in range(len(path))}
            ends = [(path, row) for path, row in tree if path not in inner]
            rewards, _ = means_of_acts([row for _, row in ends], np.array([of(row) for _, row in ends]))
            first = [ends[places[0]][0] for places in places_of_acts([row for _, row in ends])]
            leaves = list(zip(first, rewards, strict=True))
            for path, row in tree:
                below = np.array([value for leaf, value in leaves if leaf[: len(path)] == path])
                means[row.sample_id] = float(below[0] if below.min() == below.max() else below.mean())
        return means


def _others(x: Scores) -> Scores:
    """For each number, the mean of the others."""
    if x.min() == x.max():
        return x
    return (x.sum() - x) / (len(x) - 1)


def _value(row: CreditRow) -> float:
    if row.values is None:
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has no values, and C3's signal needs a critic's; "
            f"give its policy one, or use signal=reward_only"
        )
    return float(np.mean(row.values))
