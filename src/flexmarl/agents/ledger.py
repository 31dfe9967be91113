"""What was said and rewarded in one episode, by all its seats."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from flexmarl.errors import EpisodeError
from flexmarl.records import AgentName, SampleId, Turn


class CallNumbers(NamedTuple):
    """Where a call stands in its episode; each counts from 0."""

    hop: int
    """Among all calls."""
    call: int
    """Among the agent's calls."""
    nth: int
    """Among the agent's calls with the same context."""


class Ledger:
    """Numbers the calls in the order they are sent; keeps the turns and adds up the rewards."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._acts = 0
        self._hops = 0
        self._calls: dict[AgentName, int] = defaultdict(int)
        self._contexts: dict[tuple[AgentName, str], int] = defaultdict(int)
        self._turns: dict[int, Turn] = {}
        self._turn_rewards: dict[SampleId, float] = {}
        self._agent_rewards: dict[AgentName, float] = {}

    def next_act(self) -> int:
        """Number of an act that begins now."""
        self._acts += 1
        return self._acts - 1

    def next_call(self, agent: AgentName, context: str) -> CallNumbers:
        """Numbers of a call that is sent now."""
        numbers = CallNumbers(self._hops, self._calls[agent], self._contexts[agent, context])
        self._hops += 1
        self._calls[agent] += 1
        self._contexts[agent, context] += 1
        return numbers

    def add(self, hop: int, turn: Turn) -> None:
        """Keeps the answer to the call of this hop."""
        self._turns[hop] = turn

    def reward_turns(self, turns: Iterable[Turn], reward: float) -> None:
        """Adds to the reward of each of these turns."""
        reward = _finite(reward)
        for turn in turns:
            self._turn_rewards[turn.sample_id] = self._turn_rewards.get(turn.sample_id, 0.0) + reward

    def reward_agent(self, agent: AgentName, reward: float) -> None:
        """Adds to the reward of each turn the agent has at the end of the episode."""
        self._agent_rewards[agent] = self._agent_rewards.get(agent, 0.0) + _finite(reward)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, in hop order."""
        return tuple(self._turns[hop] for hop in sorted(self._turns))

    def rewards(self) -> dict[SampleId, float | None]:
        """Reward of every turn, in hop order; None where nobody gave one."""
        return {turn.sample_id: self._reward(turn) for turn in self.turns}

    def _reward(self, turn: Turn) -> float | None:
        given = (self._agent_rewards.get(turn.agent), self._turn_rewards.get(turn.sample_id))
        return None if given == (None, None) else sum(reward for reward in given if reward is not None)


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise EpisodeError(f"a reward must be a finite number, got {reward!r}")
    return float(reward)
