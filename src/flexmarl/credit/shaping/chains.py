"""Decides outcomes that compare a turn with the turns before it, or with its relatives in a tree of turns.

`Margin`    rewards a turn that is better than the turns before it in its chain
`Quality`   rewards a turn that keeps to a right answer, and punishes one that keeps to a wrong answer
`MarginWithOutcome` and `QualityWithOutcome` also reward the end of the chain
`Tree`      compares a candidate with its parent and its siblings

A chain is an agent's turns of an episode, or all turns of the episode.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given
from flexmarl.errors import CreditError
from flexmarl.records import SampleId

Scope = Literal["agent", "team"]
"""Turns that form a chain: an agent's own in an episode, or all of an episode, as in a debate."""


class Before(NamedTuple):
    """Outcomes that a turn is compared with."""

    mean: float | None
    """Mean outcome of the turns before it; None for a first turn."""
    last: float
    """Outcome of the chain's last turn."""


def compared(rows: Sequence[CreditRow], scope: Scope) -> Mapping[SampleId, Before]:
    """The outcomes that each row is compared with.

    A turn's outcome is the mean over its calls. Turns with the same number are simultaneous.
    """
    found: dict[SampleId, Before] = {}
    for chain in chains_of(rows, scope):
        turns: dict[tuple[int, str], list[float]] = {}
        for row in chain:
            turns.setdefault((row.turn, row.agent), []).append(given(row))
        outcomes = [(turn, _mean(calls)) for (turn, _), calls in sorted(turns.items())]
        last = _mean([outcome for turn, outcome in outcomes if turn == outcomes[-1][0]])
        for row in chain:
            before = [outcome for turn, outcome in outcomes if turn < row.turn]
            found[row.sample_id] = Before(_mean(before) if before else None, last)
    return found


def chains_of(rows: Sequence[CreditRow], scope: Scope) -> list[list[CreditRow]]:
    """The rows of each chain, in their order."""
    chains: dict[tuple[str, str], list[CreditRow]] = {}
    for row in rows:
        chains.setdefault((row.episode, row.agent if scope == "agent" else ""), []).append(row)
    return list(chains.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Comparison(OutcomeTerm):
    """Base of the terms that compare a turn with the turns before it in its chain."""

    alpha: float = Field(default=0.5, ge=0)
    """a: weight of the comparison."""
    scope: Scope = "agent"
    """Turns of the chain: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """True if the comparison counts: a turn may be worse than those before it, or keep to a wrong answer."""
        return self.alpha > 0


class Margin(Comparison):
    """r_t + a (r_t - Q_t), where Q_t is the mean outcome of the turns before. A first turn is unchanged."""

    type: Literal["margin"] = "margin"

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The shaped outcomes. `turn` orders the turns."""
        before = compared(rows, self.scope)
        return {row.sample_id: margin(given(row), before[row.sample_id].mean, self.alpha) for row in rows}


def margin(reward: float, before: float | None, alpha: float) -> float:
    """r_t + a (r_t - Q_t), where Q_t is `before`; r_t if there is none.

    >>> margin(1.0, 0.5, alpha=0.5), margin(1.0, None, alpha=0.5)
    (1.25, 1.0)
    """
    return reward if before is None else reward + alpha * (reward - before)


class MarginWithOutcome(Comparison):
    """`margin` + b r_last on every turn, where r_last is the outcome of the chain's last turn."""

    type: Literal["margin_with_outcome"] = "margin_with_outcome"
    beta: float = Field(default=0.5, ge=0)
    """b: weight of the chain's last outcome."""

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The shaped outcomes. `turn` orders the turns."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: margin(given(row), chain[row.sample_id].mean, self.alpha)
            + self.beta * chain[row.sample_id].last
            for row in rows
        }


class Quality(Comparison):
    """r_t + a (Q_t r_t - (1 - Q_t)(1 - r_t)), where Q_t is the mean outcome of the turns before.

    A first turn is unchanged.
    """

    type: Literal["quality"] = "quality"

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The shaped outcomes. `turn` orders the turns. Raises CreditError for an outcome outside [0, 1]."""
        before = compared(rows, self.scope)
        return {row.sample_id: quality(row, before[row.sample_id].mean, self.alpha) for row in rows}


def quality(row: CreditRow, before: float | None, alpha: float) -> float:
    """The shaped outcome of one row. Raises CreditError if its outcome is outside [0, 1]."""
    reward = given(row)
    if not 0 <= reward <= 1:
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has outcome {reward}; `quality` needs outcomes in [0, 1], "
            f"use `margin` for others"
        )
    return reward if before is None else reward + alpha * (before * reward - (1 - before) * (1 - reward))


class QualityWithOutcome(Comparison):
    """`quality` + b r_last on every turn, where r_last is the outcome of the chain's last turn."""

    type: Literal["quality_with_outcome"] = "quality_with_outcome"
    beta: float = Field(default=0.5, ge=0)
    """b: weight of the chain's last outcome."""

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The shaped outcomes. `turn` orders the turns. Raises CreditError for an outcome outside [0, 1]."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: quality(row, chain[row.sample_id].mean, self.alpha) + self.beta * chain[row.sample_id].last
            for row in rows
        }


Node = tuple[str, tuple[int, ...]]
"""A candidate: its episode, and its path from the root."""


class Tree(OutcomeTerm):
    """r_v + g (r_v - base), base = (1 - l) r_parent + l (mean of the siblings), as in MARS2.

    If there is only a parent, or only siblings, they are the base. If there is neither, r_v is unchanged.
    """

    type: Literal["tree"] = "tree"
    gain: float = Field(default=0.3, ge=0)
    """g: weight of the comparison."""
    siblings: float = Field(default=0.5, ge=0, le=1)
    """l: share of the siblings in the base."""

    sees: ClassVar[Sees] = "episode"
    needs_branches: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """True if the comparison counts: a candidate may be worse than its base."""
        return self.gain > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The shaped outcomes. A candidate's outcome is the mean over its calls. Tree sampling gives rows a `path`."""
        calls: dict[Node, list[float]] = {}
        for row in rows:
            calls.setdefault(_node(row), []).append(given(row))
        nodes = {node: sum(outcomes) / len(outcomes) for node, outcomes in calls.items()}
        families: dict[Node, list[Node]] = {}
        for node in nodes:
            families.setdefault(_parent(node), []).append(node)
        bases = {node: self._base(node, nodes, families[_parent(node)]) for node in nodes}
        shaped: dict[SampleId, float] = {}
        for row in rows:
            base = bases[_node(row)]
            shaped[row.sample_id] = given(row) if base is None else given(row) + self.gain * (given(row) - base)
        return shaped

    def _base(self, node: Node, nodes: Mapping[Node, float], family: Sequence[Node]) -> float | None:
        parent = nodes.get(_parent(node))
        others = [nodes[other] for other in family if other != node]
        siblings_mean = sum(others) / len(others) if others else None
        if parent is None or siblings_mean is None:
            return parent if siblings_mean is None else siblings_mean
        return (1 - self.siblings) * parent + self.siblings * siblings_mean


def _node(row: CreditRow) -> Node:
    return row.episode, row.node


def _parent(node: Node) -> Node:
    """The parent of a first candidate is the root, which nobody played."""
    episode, path = node
    return episode, path[:-1]
