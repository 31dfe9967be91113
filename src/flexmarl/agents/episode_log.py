"""Decides on which earlier calls each call of an episode depends; keeps the episode's turns and rewards.

CallGraph derives the dependencies from asyncio tasks, not from a clock. A task knows of the calls that it made itself,
of those that were known where it was created, and of those of the tasks that it created and that have ended. A call
depends on all calls that its task knows of when it sends the call:

    draft = await team.writer.act(text)                             hop 0
    await asyncio.gather(team.critic.act(draft.text),               hop 1, after 0
                         team.editor.act(draft.text))               hop 2, after 0
    await team.writer.act("once more")                              hop 3, after 1 and 2

Ledger numbers the calls of all seats of one episode, keeps their turns and adds up their rewards.
"""

import inspect
import math
import reprlib
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexmarl.errors import EpisodeError
from flexmarl.records import LARGEST_REWARD, AgentName, SampleId, Turn, split_sample_id


@dataclass(slots=True)
class Scope:
    """The calls that one task knows of."""

    known: "dict[CallGraph, int]" = field(default_factory=dict)
    """Known calls by episode, one bit for each hop. More than one episode if the task serves several."""

    def begun(self) -> "Scope":
        """A copy, for a task that this one creates now."""
        return Scope(dict(self.known))

    def learn(self, ended: "Scope") -> None:
        """Adds the calls in `ended`, the scope of a task that this one created and that has ended."""
        for graph, calls in ended.known.items():
            self.known[graph] = self.known.get(graph, 0) | calls


SCOPE: ContextVar[Scope | None] = ContextVar("scope", default=None)
"""Scope of the running task; workflow_tasks.py gives each task of a workflow its own."""


class CallGraph:
    """The calls of one episode, and which of them depend on which."""

    def __init__(self) -> None:
        self._earlier: dict[int, int] = {}
        """By hop: the calls that were known when its call was sent, one bit for each."""
        self._untraced = Scope()
        """Scope of seats that are used outside a workflow: each call knows of all answered calls."""
        self._found: tuple[int, tuple[int, ...]] = (0, ())
        """Last argument and result of `_latest`, cached because calls that are sent together ask for the same."""

    def sent(self, hop: int, extends: int | None = None) -> tuple[int, ...]:
        """Hops of the calls on which the call `hop`, sent now, directly depends.

        It also depends on the call `extends`, whose tokens it continues. `hop` must be higher than all hops before it.
        """
        known = (SCOPE.get() or self._untraced).known.get(self, 0)
        if extends is not None:
            known |= self._earlier[extends] | 1 << extends
        self._earlier[hop] = known
        if self._found[0] != known:
            self._found = (known, self._latest(known))
        return self._found[1]

    def answered(self, hop: int) -> None:
        """Makes the call `hop` known to the task that sent it. A call that fails never becomes known."""
        known = (SCOPE.get() or self._untraced).known
        known[self] = known.get(self, 0) | self._earlier[hop] | 1 << hop

    def _latest(self, calls: int) -> tuple[int, ...]:
        """Hops of those `calls` on which none of the others depends."""
        hops: list[int] = []
        while calls:
            hop = calls.bit_length() - 1  # The one sent last: none of the others can depend on it.
            hops.append(hop)
            calls &= ~(self._earlier[hop] | 1 << hop)
        return tuple(sorted(hops))


class CallNumbers(NamedTuple):
    """The numbers of a call in its episode, each counted from 0."""

    hop: int
    """Among all calls."""
    call: int
    """Among the agent's calls."""
    nth: int
    """Among the agent's calls with the same context."""
    of_fork: int
    """Among all calls of its fork."""


class _Counts:
    """Numbers of calls so far, shared by a ledger and all its forks."""

    def __init__(self) -> None:
        self.hops = 0
        self.calls: dict[AgentName, int] = defaultdict(int)


class Ledger:
    """Numbers the calls in the order they are sent; keeps the turns and adds up the rewards."""

    def __init__(self) -> None:
        self.graph = CallGraph()
        self.metrics: dict[str, float] = {}
        self.untrained: dict[SampleId, str] = {}
        """Calls that were left out, each with the reason. Forks share it."""
        self._acts = 0
        self._lanes = 0
        self._branches: dict[AgentName, int] = defaultdict(int)
        self._handed: dict[SampleId, Turn] = {}
        """For each turn of delegated work, the turn that handed it over."""
        self._sent = 0
        self._counts = _Counts()
        self._forks: list[Ledger] = []
        self._made: list[tuple[Coroutine[Any, Any, Any], tuple[str, int]]] = []
        """All acts so far, those of forks included, with file and line of the code that made each."""
        self._contexts: dict[tuple[AgentName, str], int] = defaultdict(int)
        self._turns: dict[int, Turn] = {}
        # Reward by part, on each of three levels. A missing entry means that no reward was given.
        self._team_rewards: dict[str, float] = {}
        self._agent_rewards: dict[AgentName, dict[str, float]] = defaultdict(dict)
        self._call_rewards: dict[SampleId, dict[str, float]] = defaultdict(dict)
        self._signals: dict[SampleId, dict[str, float]] = defaultdict(dict)

    def fork(self) -> "Ledger":
        """A ledger for a branch. It shares the numbering and copies the metrics. Its rewards reach only its turns."""
        fork = Ledger()
        fork.metrics, fork._counts, fork.graph = dict(self.metrics), self._counts, self.graph
        fork._made, fork.untrained = self._made, self.untrained
        fork._branches |= self._branches
        self._forks.append(fork)
        return fork

    def make_act(self, act: Coroutine[Any, Any, Any], file: str, line: int) -> None:
        """Keeps an act that was made at this line, and begins when it is awaited."""
        self._made.append((act, (file, line)))

    def never_awaited(self) -> list[tuple[str, int]]:
        """File and line of each act that was made and not awaited, in the order of making. They are closed."""
        waiting = [made for made in self._made if inspect.getcoroutinestate(made[0]) == inspect.CORO_CREATED]
        for act, _ in waiting:
            act.close()  # Else Python warns of it, without the line.
        return [place for _, place in waiting]

    def next_act(self) -> int:
        """Number of an act that begins now."""
        self._acts += 1
        return self._acts - 1

    def next_lane(self) -> int:
        """Number of a piece of delegated work that begins now, from 1."""
        self._lanes += 1
        return self._lanes

    def next_branch(self, agent: AgentName) -> int:
        """Number of a branch that a conversation of the agent begins now."""
        self._branches[agent] += 1
        return self._branches[agent] - 1

    def next_call(self, agent: AgentName, context: str) -> CallNumbers:
        """Numbers of a call that is sent now."""
        counts = self._counts
        numbers = CallNumbers(counts.hops, counts.calls[agent], self._contexts[agent, context], self._sent)
        counts.hops += 1
        counts.calls[agent] += 1
        self._contexts[agent, context] += 1
        self._sent += 1
        return numbers

    def add(self, turn: Turn, *, known: bool = True) -> None:
        """Keeps the answer to a call, and makes the call known to the task that sent it, unless `known` is False."""
        self._turns[turn.hop] = turn
        if known:
            self.graph.answered(turn.hop)

    def leave_out(self, sample_id: SampleId, because: str) -> None:
        """Takes a call out of training: its tokens are kept, but it is no turn of the episode, and needs no reward."""
        self._turns.pop(split_sample_id(sample_id)[1], None)
        self.untrained[sample_id] = because

    def hand_over(self, turn: Turn, by: Turn) -> None:
        """Notes that a turn is part of what `by` has delegated: it is rewarded as `by` is, unless by itself."""
        self._handed[turn.sample_id] = by

    def reward_turns(self, turns: Iterable[Turn], reward: float, part: str) -> None:
        """Adds `reward` to the reward of each of these turns, under the name `part`."""
        for turn in turns:
            _add(self._call_rewards[turn.sample_id], part, reward)

    def reward_agent(self, agent: AgentName, reward: float, part: str) -> None:
        """Adds `reward` to the reward of each turn that the agent has at the end of the episode."""
        _add(self._agent_rewards[agent], part, reward)

    def reward_team(self, reward: float, part: str) -> None:
        """Adds `reward` to the reward of each turn, of all agents, at the end of the episode."""
        _add(self._team_rewards, part, reward)

    def replace_rewards(self, reward: float) -> None:
        """Removes all rewards given so far, and gives `reward` to each turn so far, those of forks included."""
        self._team_rewards.clear()
        self._agent_rewards.clear()
        self._call_rewards.clear()
        self.reward_turns(self._turns.values(), reward, "outcome")
        for fork in self._forks:
            fork.replace_rewards(reward)

    def note(self, turn: Turn, signals: Mapping[str, float]) -> None:
        """Keeps the signals found in a turn."""
        self._signals[turn.sample_id] |= signals

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, including those of forks, in hop order."""
        return tuple(turn for turn, _ in self._kept())

    def rewards(self) -> dict[SampleId, float | None]:
        """Reward of every turn, in hop order; None if none was given."""
        return {sample_id: sum(parts.values()) if parts else None for sample_id, parts in self.parts().items()}

    def total_reward(self) -> float:
        """Sum of the rewards given here, without forks: to the team, to agents with turns here, to acts; each once."""
        hops = sorted(self._turns.items(), reverse=True)
        first_calls = {(turn.agent, hop if turn.act_hop is None else turn.act_hop): turn for hop, turn in hops}
        given = [self._call_rewards.get(turn.sample_id, {}) for turn in first_calls.values()]
        given += [self._agent_rewards.get(agent, {}) for agent in {agent for agent, _ in first_calls}]
        return math.fsum(reward for parts in (self._team_rewards, *given) for reward in parts.values())

    def parts(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that the reward of every turn adds up from, in hop order; empty if none was given."""
        return {turn.sample_id: ledger._parts(turn) for turn, ledger in self._kept()}

    def call_rewards(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that were given to each turn itself, not to its agent or to the team."""
        return {turn.sample_id: {**ledger._call_rewards.get(turn.sample_id, {})} for turn, ledger in self._kept()}

    def signals(self) -> dict[SampleId, Mapping[str, float]]:
        """The signals found in every turn, in hop order."""
        return {turn.sample_id: ledger._signals.get(turn.sample_id, {}) for turn, ledger in self._kept()}

    def _kept(self) -> list[tuple[Turn, "Ledger"]]:
        """Every turn with the ledger that holds it, in hop order."""
        return [kept for _, kept in sorted(self._by_hop().items())]

    def _by_hop(self) -> dict[int, tuple[Turn, "Ledger"]]:
        found: dict[int, tuple[Turn, Ledger]] = {hop: (turn, self) for hop, turn in self._turns.items()}
        for fork in self._forks:
            found |= fork._by_hop()
        return found

    def _parts(self, turn: Turn) -> dict[str, float]:
        own = self._agent_rewards.get(turn.agent), self._call_rewards.get(turn.sample_id)
        if turn.sample_id in self._handed and not any(own):
            return self._parts(self._handed[turn.sample_id])
        parts = dict(self._team_rewards)
        for given in filter(None, own):
            for part, reward in given.items():
                _add(parts, part, reward)
        return parts


def finite(value: float, what: str) -> float:
    """A finite number as a float. Raises EpisodeError, which begins with `what`, for any other value."""
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(value):
            return float(value)
    raise EpisodeError(f"{what} must be a finite number, got {reprlib.repr(value)}")


def _add(parts: dict[str, float], part: str, reward: float) -> None:
    total = parts.get(part, 0.0) + finite(reward, "a reward")
    if abs(total) > LARGEST_REWARD:
        raise EpisodeError(
            f"rewards of one part must add up to {LARGEST_REWARD:g} at most, either sign, got {reward!r} for '{part}', "
            f"{total!r} in all; give rewards on a smaller scale, e.g. from 0 to 1"
        )
    if not part.isidentifier():
        raise EpisodeError(f"a part of a reward must be named as a variable is, e.g. 'format', got {part!r}")
    parts[part] = total
