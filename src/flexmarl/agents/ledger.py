"""Decides which calls of an episode may have had a part in a call. No clock is asked.

A task knows of the calls it made itself, of those that were known where it was created, and of those of the tasks it
created that have ended. What it sends depends on what it knows then:

    draft = await team.writer.act(text)                             hop 0
    await asyncio.gather(team.critic.act(draft.text),               hop 1, after 0
                         team.editor.act(draft.text))               hop 2, after 0
    await team.writer.act("once more")                              hop 3, after 1 and 2

What was said and rewarded in one episode, by all its seats.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from flexmarl.errors import EpisodeError
from flexmarl.records import LARGEST_REWARD, AgentName, SampleId, Turn


@dataclass(slots=True)
class Scope:
    """What one task knows of."""

    known: "dict[CallGraph, int]" = field(default_factory=dict)
    """The calls of each episode, each as the bit of its hop; of more than one if the task serves several."""

    def begun(self) -> "Scope":
        """The scope of a task that this one creates now."""
        return Scope(dict(self.known))

    def learn(self, ended: "Scope") -> None:
        """A task that this one created has ended."""
        for graph, calls in ended.known.items():
            self.known[graph] = self.known.get(graph, 0) | calls


SCOPE: ContextVar[Scope | None] = ContextVar("scope", default=None)
"""Of the task that runs; workflow_tasks.py gives each task of a workflow its own."""


class CallGraph:
    """The calls of one episode: which depend on which."""

    def __init__(self) -> None:
        self._earlier: dict[int, int] = {}
        """What was known when the call of a hop was sent."""
        self._untraced = Scope()
        """For seats that are tried outside a workflow: each call knows of all that were answered."""
        self._found: tuple[int, tuple[int, ...]] = (0, ())
        """The last answer of `_latest`: calls that are sent together ask for the same."""

    def sent(self, hop: int, extends: int | None = None) -> tuple[int, ...]:
        """Hops of the calls that a call sent now directly depends on, the one whose tokens it `extends` among them.

        A call has a higher hop than all that were sent before.
        """
        known = (SCOPE.get() or self._untraced).known.get(self, 0)
        if extends is not None:
            known |= self._earlier[extends] | 1 << extends
        self._earlier[hop] = known
        if self._found[0] != known:
            self._found = (known, self._latest(known))
        return self._found[1]

    def answered(self, hop: int) -> None:
        """The task that sent it goes on, and knows of it. Of a call that fails, nobody learns anything."""
        known = (SCOPE.get() or self._untraced).known
        known[self] = known.get(self, 0) | self._earlier[hop] | 1 << hop

    def _latest(self, calls: int) -> tuple[int, ...]:
        """Those that none of the others depends on."""
        hops: list[int] = []
        while calls:
            hop = calls.bit_length() - 1  # Sent last: none of the others can depend on it.
            hops.append(hop)
            calls &= ~(self._earlier[hop] | 1 << hop)
        return tuple(sorted(hops))


class CallNumbers(NamedTuple):
    """Where a call stands in its episode; each counts from 0."""

    hop: int
    """Among all calls."""
    call: int
    """Among the agent's calls."""
    nth: int
    """Among the agent's calls with the same context."""
    of_fork: int
    """Among all calls of its fork."""


class _Counts:
    """Calls so far, of a ledger and all its forks."""

    def __init__(self) -> None:
        self.hops = 0
        self.calls: dict[AgentName, int] = defaultdict(int)


class Ledger:
    """Numbers the calls in the order they are sent; keeps the turns and adds up the rewards."""

    def __init__(self) -> None:
        self.graph = CallGraph()
        self.metrics: dict[str, float] = {}
        self._acts = 0
        self._sent = 0
        self._counts = _Counts()
        self._forks: list[Ledger] = []
        self._contexts: dict[tuple[AgentName, str], int] = defaultdict(int)
        self._turns: dict[int, Turn] = {}
        # Reward by part, at each of the three levels; what nobody rewarded is not there.
        self._team_rewards: dict[str, float] = {}
        self._agent_rewards: dict[AgentName, dict[str, float]] = defaultdict(dict)
        self._call_rewards: dict[SampleId, dict[str, float]] = defaultdict(dict)
        self._signals: dict[SampleId, dict[str, float]] = defaultdict(dict)

    def fork(self) -> "Ledger":
        """One for a branch: hops go on counting, what was reported stands; rewards given there reach no other turns."""
        fork = Ledger()
        fork.metrics, fork._counts, fork.graph = dict(self.metrics), self._counts, self.graph
        self._forks.append(fork)
        return fork

    def next_act(self) -> int:
        """Number of an act that begins now."""
        self._acts += 1
        return self._acts - 1

    def next_call(self, agent: AgentName, context: str) -> CallNumbers:
        """Numbers of a call that is sent now."""
        counts = self._counts
        numbers = CallNumbers(counts.hops, counts.calls[agent], self._contexts[agent, context], self._sent)
        counts.hops += 1
        counts.calls[agent] += 1
        self._contexts[agent, context] += 1
        self._sent += 1
        return numbers

    def add(self, hop: int, turn: Turn) -> None:
        """Keeps the answer to the call of this hop; the task that sent it goes on."""
        self._turns[hop] = turn
        self.graph.answered(hop)

    def reward_turns(self, turns: Iterable[Turn], reward: float, part: str) -> None:
        """Adds to the reward of each of these turns."""
        for turn in turns:
            _add(self._call_rewards[turn.sample_id], part, reward)

    def reward_agent(self, agent: AgentName, reward: float, part: str) -> None:
        """Adds to the reward of each turn the agent has at the end of the episode."""
        _add(self._agent_rewards[agent], part, reward)

    def reward_team(self, reward: float, part: str) -> None:
        """Adds to the reward of each turn, of all agents, that there is at the end of the episode."""
        _add(self._team_rewards, part, reward)

    def note(self, turn: Turn, signals: Mapping[str, float]) -> None:
        """Keeps what was found in a turn."""
        self._signals[turn.sample_id] |= signals

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, those of forks too, in hop order."""
        return tuple(turn for turn, _ in self._kept())

    def rewards(self) -> dict[SampleId, float | None]:
        """Reward of every turn, in hop order; None where nobody gave one."""
        return {sample_id: sum(parts.values()) if parts else None for sample_id, parts in self.parts().items()}

    def total_reward(self) -> float:
        """Sum of what was given here, to the team, to agents that spoke here and to acts: each once."""
        hops = sorted(self._turns.items(), reverse=True)
        first_calls = {(turn.agent, turn.tags.get("act", hop)): turn for hop, turn in hops}
        given = [self._call_rewards.get(turn.sample_id, {}) for turn in first_calls.values()]
        given += [self._agent_rewards.get(agent, {}) for agent in {agent for agent, _ in first_calls}]
        return math.fsum(reward for parts in (self._team_rewards, *given) for reward in parts.values())

    def parts(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that the reward of every turn adds up from, in hop order; empty where nobody gave one."""
        return {turn.sample_id: ledger._parts(turn) for turn, ledger in self._kept()}

    def call_rewards(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that every turn was given for itself, and not as one of its agent's or of the team's."""
        return {turn.sample_id: {**ledger._call_rewards.get(turn.sample_id, {})} for turn, ledger in self._kept()}

    def signals(self) -> dict[SampleId, Mapping[str, float]]:
        """What was found in every turn, in hop order."""
        return {turn.sample_id: ledger._signals.get(turn.sample_id, {}) for turn, ledger in self._kept()}

    def _kept(self) -> list[tuple[Turn, "Ledger"]]:
        """Every turn with the ledger that has it, in hop order."""
        return [kept for _, kept in sorted(self._by_hop().items())]

    def _by_hop(self) -> dict[int, tuple[Turn, "Ledger"]]:
        found: dict[int, tuple[Turn, Ledger]] = {hop: (turn, self) for hop, turn in self._turns.items()}
        for fork in self._forks:
            found |= fork._by_hop()
        return found

    def _parts(self, turn: Turn) -> dict[str, float]:
        parts = dict(self._team_rewards)
        for given in (self._agent_rewards.get(turn.agent, {}), self._call_rewards.get(turn.sample_id, {})):
            for part, reward in given.items():
                _add(parts, part, reward)
        return parts


def _add(parts: dict[str, float], part: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise EpisodeError(f"a reward must be a finite number, got {reward!r}")
    total = parts.get(part, 0.0) + float(reward)
    if abs(total) > LARGEST_REWARD:
        raise EpisodeError(
            f"rewards of one part must add up to {LARGEST_REWARD:g} at most, either sign, got {reward!r} for '{part}', "
            f"{total!r} in all; give rewards on a smaller scale, e.g. from 0 to 1"
        )
    if not part.isidentifier():
        raise EpisodeError(f"a part of a reward must be named as a variable is, e.g. 'format', got {part!r}")
    parts[part] = total
