"""Decides rewards for speed, length, proposals, clean calls and few tool calls.

`CompletionTime`   rewards successful episodes that are quicker than the other successes of their task
`Learnability`     rewards a proposer, most for tasks that are solved half of the time
`Overlong`         charges responses that come near the length limit or pass it (DAPO's soft punishment)
`Process`          charges calls in which something went wrong, whatever the result of their episode
`Otc`              pays successes with fewer tool calls more

`longest_path` and `descendants` read the graph of an episode's calls.
"""

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi, sin
from statistics import median
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.credit.interface import CreditRow, GraphCall
from flexmarl.credit.shaping.base import AddedTerm, OutcomeTerm, Sees, by_episode, given
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId


def longest_path(calls: Sequence[GraphCall], cost: Callable[[GraphCall], float]) -> float:
    """The largest sum of costs along calls that wait for one another. `calls` are in hop order.

    >>> graph = [GraphCall(hop=0), GraphCall(hop=1, after=(0,)), GraphCall(hop=2, after=(0,))]
    >>> longest_path(graph, lambda call: call.hop + 1.0)
    4.0
    """
    ends: dict[int, float] = {}
    for call in calls:
        ends[call.hop] = cost(call) + max((ends[hop] for hop in call.after), default=0.0)
    return max(ends.values(), default=0.0)


def descendants(calls: Sequence[GraphCall]) -> Mapping[int, frozenset[int]]:
    """For each hop, the hops of the calls that depend on it, directly or not. `calls` are in hop order."""
    found: dict[int, set[int]] = {call.hop: set() for call in calls}
    for call in reversed(calls):  # All calls that depend on it have been visited.
        for hop in call.after:
            found[hop] |= {call.hop, *found[call.hop]}
    return {hop: frozenset(later) for hop, later in found.items()}


class CompletionTime(AddedTerm):
    """bonus clip((ref - T) / ref, -1, 1) for successes, 0 for failures; ref is the median T of the successes.

    T is the longest path through the calls of an episode, with the modelled cost of each call, so concurrent calls
    shorten it. With fewer than two successes the bonus is 0.
    """

    type: Literal["completion_time"] = "completion_time"
    bonus: float = Field(default=0.1, ge=0)
    """lambda. It must be less than success - failure, so that no failure beats a success."""
    success: float = 1.0
    """Least outcome of a success. An agent's episode is a success if all its turns in it are."""
    failure: float = 0.0
    """Largest outcome of a failure. Outcomes in between are an error."""
    prompt_token_s: float = Field(default=0.0002, ge=0)
    """c_p: cost of a new token in a prompt."""
    output_token_s: float = Field(default=0.02, ge=0)
    """c_d: cost of a sampled token."""

    sees: ClassVar[Sees] = "task"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False

    @model_validator(mode="after")
    def _successes_stay_ahead(self) -> "CompletionTime":
        lead = self.success - self.failure
        if self.bonus >= lead:
            raise ValueError(
                f"bonus: {self.bonus:g} must be less than success - failure = {lead:g}, "
                f"else a quick failure could beat a slow success"
            )
        return self

    @property
    def may_be_negative(self) -> bool:
        """True if a slow success can lose more than its outcome. Failures lose nothing."""
        return self.bonus > self.success

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The bonus of each agent's episode, the same for all its turns."""
        episodes = by_episode([row for row in rows if self.is_for(row.agent)])
        times = {episode: longest_path(played[0].calls, self.cost) for episode, played in episodes.items()}
        successes: dict[AgentName, list[CreditRow]] = {}
        for played in episodes.values():
            for agent, own in _by_agent(played).items():
                if {self._is_success(row) for row in own} == {True}:
                    successes.setdefault(agent, []).extend(own)
        earned = {row.sample_id: 0.0 for played in episodes.values() for row in played}
        for own in successes.values():
            compared = {row.episode for row in own if not row.greedy}
            if len(compared) > 1:
                reference = median(times[episode] for episode in compared)
                earned |= {row.sample_id: self.bonus * _ahead(times[row.episode], reference) for row in own}
        return earned

    def cost(self, call: GraphCall) -> float:
        """Seconds of a call. Token times are modelled, so that the machine does not matter; tool times are measured."""
        return call.new_prompt_tokens * self.prompt_token_s + call.num_tokens * self.output_token_s + call.tool_s

    def _is_success(self, row: CreditRow) -> bool:
        outcome = given(row)
        if self.failure < outcome < self.success:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has outcome {outcome:g}, for completion_time neither "
                f"a success (>= {self.success:g}) nor a failure (<= {self.failure:g}); change one of these settings"
            )
        return outcome >= self.success


def _ahead(time: float, reference: float) -> float:
    return min(max((reference - time) / reference, -1.0), 1.0) if reference else 0.0


class Learnability(OutcomeTerm):
    """4 p (1 - p), where p is the share of the episode's attempts at the proposed task that solved it."""

    type: Literal["learnability"] = "learnability"
    agents: tuple[AgentName, ...] = Field(min_length=1)
    """The proposers."""
    solvers: tuple[AgentName, ...] = Field(min_length=1)
    """Trained agents whose turns are the attempts."""
    threshold: float = 0.5
    """An attempt solved the task if its outcome is higher."""

    sees: ClassVar[Sees] = "episode"

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The same outcome for all proposers of an episode. Raises CreditError for a proposal without an attempt."""
        earned: dict[SampleId, float] = {}
        for episode, played in by_episode(rows).items():
            proposed = [row for row in played if self.is_for(row.agent)]
            attempts = {_attempt(row): given(row) for row in played if row.agent in self.solvers}
            if proposed and not attempts:
                raise CreditError(
                    f"episode {episode}: no trained turn of {', '.join(self.solvers)}, so that what "
                    f"{proposed[0].agent} proposed has no solve rate; name agents that attempt it in every episode"
                )
            for row in proposed:
                solved = sum(outcome > self.threshold for outcome in attempts.values()) / len(attempts)
                earned[row.sample_id] = 4 * solved * (1 - solved)
        return earned


def _attempt(row: CreditRow) -> tuple[AgentName, int, tuple[int, ...]]:
    """Key of the attempt that a call belongs to. In a tree of turns, each candidate is an attempt."""
    return row.agent, row.turn, row.path


class Overlong(AddedTerm):
    """-f clip((len - (Lmax - buffer)) / buffer, 0, 1), where len counts the sampled tokens of a call."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Lmax: from this length on the penalty is full."""
    buffer: int = Field(ge=1)
    """Number of tokens before Lmax over which the penalty grows."""
    penalty: float = Field(default=1.0, ge=0)
    """f: the full penalty."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Overlong":
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer: {self.buffer} is more than max_tokens={self.max_tokens}; use a part of it")
        return self

    @property
    def may_be_negative(self) -> bool:
        """True if a response that is too long costs anything."""
        return self.penalty > 0

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The penalty for the length of each call."""
        return {row.sample_id: -self.penalty * self._share(row.num_tokens) for row in rows}

    def _share(self, num_tokens: int) -> float:
        return min(max((num_tokens - (self.max_tokens - self.buffer)) / self.buffer, 0.0), 1.0)


Signal = Literal[
    "tool_error", "format_error", "language_mix", "bad_tool_calls", "dropped_tool_calls", "tool_calls", "tool_cost"
]


class Process(AddedTerm):
    """-min(c_max, sum of c_q v_q) over the signals found in the call itself: shares, a number of calls, a cost."""

    type: Literal["process"] = "process"
    costs: Mapping[Signal, float] = {"tool_error": 0.05, "format_error": 0.05, "language_mix": 0.05}
    """c_q: cost of each signal that counts."""
    most: float = Field(default=0.2, ge=0)
    """c_max: largest cost of a call."""
    language_mix_from: float = Field(default=0.1, ge=0, le=1)
    """A smaller share of letters that are foreign to the task counts as 0, since names and quotations cause it."""

    @field_validator("costs")
    @classmethod
    def _costs_are_costs(cls, costs: Mapping[Signal, float]) -> Mapping[Signal, float]:
        for signal, cost in costs.items():
            if cost < 0:
                raise ValueError(f"{signal}: a cost must be at least 0, got {cost}; a signal is never rewarded")
        return costs

    @property
    def may_be_negative(self) -> bool:
        """True if a signal costs anything."""
        return self.most > 0 and any(self.costs.values())

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The cost of the signals in each call."""
        return {row.sample_id: -min(self.most, self._cost(row.signals)) for row in rows}

    def _cost(self, signals: Mapping[str, float]) -> float:
        found = {signal: signals.get(signal, 0.0) for signal in self.costs}
        if found.get("language_mix", 0.0) < self.language_mix_from:
            found["language_mix"] = 0.0
        return sum(cost * found[signal] for signal, cost in self.costs.items())


class Otc(OutcomeTerm):
    """alpha r_tool r: a positive outcome shrinks with the tool calls that its agent ran in the episode (OTC).

    m is the number of these calls, n the least m of the agent's successes in the task (arXiv 2504.14870).
    With `form: ppo`, r_tool = cos(m pi / (2 m + c)): 1 without a call, and less for each. With `form: grpo`, calls are
    compared with the fewest that were enough: r_tool = sin(f pi / (2 n)) with f = 2 m n / (m + n), and
    r_tool = cos(m pi / (2 m + c)) if n = 0. It is 1 at m = n. r_tool is in (0, 1], so a success stays above 0.

    Outcomes that are not positive become alpha r: a punishment does not shrink with calls. n is that of the group. The
    paper keeps the least of all earlier groups of a task, too; the two agree where no task is played twice.
    """

    type: Literal["otc"] = "otc"
    form: Literal["ppo", "grpo"] = "grpo"
    """grpo: calls are compared with those of the task's other episodes. ppo: each episode is judged alone."""
    alpha: float = Field(default=1.0, gt=0)
    """Weight of the outcome."""
    c: float = Field(default=1.0, gt=0)
    """How slowly r_tool falls where no call is needed. A common choice is the largest number of calls of an episode."""
    threshold: float = 0.5
    """An agent's episode is a success if all its outcomes in it are higher."""

    sees: ClassVar[Sees] = "task"
    follows_calls: ClassVar[bool] = True

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The new outcomes. All turns of an agent in an episode have the same r_tool."""
        plays = [play for played in by_episode(rows).values() for play in _by_agent(played).values()]
        least: dict[AgentName, int] = {}
        for play in plays:
            if all(given(row) > self.threshold for row in play) and not play[0].greedy:
                agent = play[0].agent
                least[agent] = min(least.get(agent, calls_of(play)), calls_of(play))
        earned: dict[SampleId, float] = {}
        for play in plays:
            calls = calls_of(play)
            share = self.share(calls, 0 if self.form == "ppo" else least.get(play[0].agent, calls))
            earned |= {row.sample_id: self.alpha * given(row) * (share if given(row) > 0 else 1.0) for row in play}
        return earned

    def share(self, calls: int, least: int) -> float:
        """r_tool of an episode with m = `calls`, where n = `least`.

        >>> Otc().share(2, 2), Otc(c=2.0).share(1, 0)
        (1.0, 0.7071067811865476)
        """
        if not least:
            return cos(calls * pi / (2 * calls + self.c))
        return sin(calls * pi / (calls + least))  # f pi / (2 n), with f = 2 m n / (m + n).


def calls_of(play: Sequence[CreditRow]) -> int:
    """Tool calls that were run for these turns."""
    return round(sum(row.signals.get("tool_calls", 0.0) for row in play))


def _by_agent(rows: Sequence[CreditRow]) -> Mapping[AgentName, list[CreditRow]]:
    plays: dict[AgentName, list[CreditRow]] = {}
    for row in rows:
        plays.setdefault(row.agent, []).append(row)
    return plays
