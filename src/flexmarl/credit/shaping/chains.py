"""Decides which turns form a chain, and which were before a turn, for terms that compare it with them.

Decides outcomes that say how a turn compares with those before it.

Decides outcomes that say how a turn compares with those before it, and how its chain ended.

Decides outcomes that reward a turn for standing by what is right and for mending what is wrong.

Decides outcomes that reward a turn for mending what is wrong, and for how its chain ended.

Decides outcomes in a tree of turns: how a candidate compares with what it came from and with its siblings.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given, turn_of
from flexmarl.errors import CreditError
from flexmarl.records import SampleId

Scope = Literal["agent", "team"]
"""Whose turns form a chain: an agent's own of an episode, or all of an episode, as in a debate."""


class Before(NamedTuple):
    """What a turn is compared with."""

    mean: float | None
    """Of the outcomes of the turns before it; None for a first turn."""
    last: float
    """Outcome of the chain's last turn."""


def compared(rows: Sequence[CreditRow], scope: Scope) -> Mapping[SampleId, Before]:
    """For each row, its chain. A turn's outcome is the mean over its calls; turns of one number are at once."""
    found: dict[SampleId, Before] = {}
    for chain in chains_of(rows, scope):
        turns: dict[tuple[int, str], list[float]] = {}
        for row in chain:
            turns.setdefault((turn_of(row), row.agent), []).append(given(row))
        outcomes = [(turn, _mean(calls)) for (turn, _), calls in sorted(turns.items())]
        last = _mean([outcome for turn, outcome in outcomes if turn == outcomes[-1][0]])
        for row in chain:
            before = [outcome for turn, outcome in outcomes if turn < turn_of(row)]
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


class Margin(OutcomeTerm):
    """r_t + a (r_t - Q_t), where Q_t is the mean of the turns before; a first turn is unchanged."""

    type: Literal["margin"] = "margin"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    scope: Scope = "agent"
    """Whose turns before: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn is worse than those before it."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`."""
        before = compared(rows, self.scope)
        return {row.sample_id: margin(given(row), before[row.sample_id].mean, self.alpha) for row in rows}


def margin(reward: float, before: float | None, alpha: float) -> float:
    """r_t + a (r_t - Q_t).

    >>> margin(1.0, 0.5, alpha=0.5), margin(1.0, None, alpha=0.5)
    (1.25, 1.0)
    """
    return reward if before is None else reward + alpha * (reward - before)


class MarginWithOutcome(OutcomeTerm):
    """`margin` + b r_last on every turn."""

    type: Literal["margin_with_outcome"] = "margin_with_outcome"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    beta: float = Field(default=0.5, ge=0)
    """b."""
    scope: Scope = "agent"
    """Whose turns: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn is worse than those before it."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: margin(given(row), chain[row.sample_id].mean, self.alpha)
            + self.beta * chain[row.sample_id].last
            for row in rows
        }


class Quality(OutcomeTerm):
    """r_t + a (Q_t r_t - (1 - Q_t)(1 - r_t)), where Q_t is the mean of the turns before; a first turn is unchanged."""

    type: Literal["quality"] = "quality"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    scope: Scope = "agent"
    """Whose turns before: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn stands by what is wrong."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`. Raises CreditError for an outcome outside [0, 1]."""
        before = compared(rows, self.scope)
        return {row.sample_id: quality(row, before[row.sample_id].mean, self.alpha) for row in rows}


def quality(row: CreditRow, before: float | None, alpha: float) -> float:
    """The outcome of one row."""
    reward = given(row)
    if not 0 <= reward <= 1:
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has outcome {reward}; `quality` needs outcomes in [0, 1], "
            f"use `margin` for others"
        )
    return reward if before is None else reward + alpha * (before * reward - (1 - before) * (1 - reward))


class QualityWithOutcome(OutcomeTerm):
    """`quality` + b r_last on every turn."""

    type: Literal["quality_with_outcome"] = "quality_with_outcome"
    alpha: float = Field(default=0.5, ge=0)
    """a."""
    beta: float = Field(default=0.5, ge=0)
    """b."""
    scope: Scope = "agent"
    """Whose turns: the agent's own, or all of the episode, as in a debate."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a turn stands by what is wrong."""
        return self.alpha > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `turn`. Raises CreditError for an outcome outside [0, 1]."""
        chain = compared(rows, self.scope)
        return {
            row.sample_id: quality(row, chain[row.sample_id].mean, self.alpha) + self.beta * chain[row.sample_id].last
            for row in rows
        }


Node = tuple[str, str]
"""Episode, and path from its root, e.g. `0.3.1`."""


class Tree(OutcomeTerm):
    """r_v + g (r_v - base), base = (1 - l) r_parent + l (mean of the siblings), as in MARS2.

    Where there is only a parent, or only siblings, they are the base; where there is neither, r_v stays.
    """

    type: Literal["tree"] = "tree"
    gain: float = Field(default=0.3, ge=0)
    """g."""
    siblings: float = Field(default=0.5, ge=0, le=1)
    """l."""

    sees: ClassVar[Sees] = "episode"
    needs_branches: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a candidate is worse than what it is compared with."""
        return self.gain > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `path`, which tree sampling gives; a candidate's outcome is the mean over its calls."""
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
        beside = sum(others) / len(others) if others else None
        if parent is None or beside is None:
            return parent if beside is None else beside
        return (1 - self.siblings) * parent + self.siblings * beside


def _node(row: CreditRow) -> Node:
    return row.episode, str(row.tag("path"))


def _parent(node: Node) -> Node:
    """`0.3.1` -> `0.3`; a first candidate's is the root, which nobody played."""
    episode, path = node
    return episode, path.rpartition(".")[0]
