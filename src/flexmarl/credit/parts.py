"""Decides what the rewards of each agent are made of, on average: each part apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexmarl.credit.interface import CreditRow
from flexmarl.records import AgentName


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Of one agent's rewarded turns."""

    turns: int
    means: Mapping[str, float]
    """By part; together they are the mean reward."""


def reward_parts(rows: Sequence[CreditRow]) -> Mapping[AgentName, RewardParts]:
    """By agent, of rows with their final rewards; those of a greedy play are not counted."""
    by_agent: dict[AgentName, list[Mapping[str, float]]] = {}
    for row in rows:
        if row.reward is not None and not row.greedy:
            by_agent.setdefault(row.agent, []).append(row.parts or {"outcome": row.reward})
    return {agent: RewardParts(turns=len(parts), means=_means(parts)) for agent, parts in by_agent.items()}


def _means(turns: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """A part that a turn has not is 0 there."""
    names = dict.fromkeys(name for parts in turns for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in turns) / len(turns) for name in names}
