"""Records of play, from the question to the group of its episodes.

Task         one question for the team
Turn         one LLM call by one agent, exactly as it was sampled
Episode      one run of the workflow on one task
GroupRecord  all episodes of one task in one step
"""

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexmarl.errors import EpisodeError
from flexmarl.records.ids import AgentName, EpisodeId, GroupId, PolicyName, SampleId, Scalar, Version, split_sample_id
from flexmarl.records.scorers import SCORERS, Scorer, exact_match


class Spoken(NamedTuple):
    """One message that a task has before its prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question for the team and how to score an answer to it."""

    input_id: str
    """Unique in its source, e.g. `mul5x5-17`; the first part of every sample id of this task."""
    prompt: str
    opening: tuple[Spoken, ...] = ()
    """Messages before the prompt: a system prompt, then earlier rounds, in which user and assistant alternate. They
    begin the conversations of all agents, but for those whose `hears_task` is false."""
    reference: str = ""
    scorer: Scorer | str = exact_match
    """(answer, reference) -> score; a module-level function, so that the task can cross processes. A name is replaced
    by the scorer of that name; an unknown one raises ConfigError."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further input of the workflow or the environment, e.g. a level, a seed or files."""

    def __post_init__(self) -> None:
        """Looks up a scorer that is given by its name."""
        if isinstance(self.scorer, str):
            object.__setattr__(self, "scorer", SCORERS[self.scorer])

    @property
    def question(self) -> str:
        """Text that only equal questions share: the prompt, with the messages before it if there are any."""
        return "\0".join((*(f"{one.role}\1{one.content}" for one in self.opening), self.prompt))

    def score(self, answer: str) -> float:
        """The score of an answer, by `scorer`; 1.0 is a full success. Raises EpisodeError if it is no finite number.

        `await team.score(answer)` does the same, and takes scorers that must be waited for, too.
        """
        assert callable(self.scorer), "a name was looked up when the task was made"
        if inspect.iscoroutinefunction(self.scorer):
            raise EpisodeError(f"the scorer {self._scorer_name} must be waited for; write `await team.score(answer)`")
        return self.checked_score(self.scorer(answer, self.reference))

    def checked_score(self, given: Any) -> float:
        """A scorer's result as a number. Raises EpisodeError if it is no finite number."""
        with suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(score := float(given)):
                return score
        raise EpisodeError(
            f"the scorer {self._scorer_name} returned {given!r}; return a finite number, 1.0 for a full success"
        )

    @property
    def _scorer_name(self) -> str:
        return getattr(self.scorer, "__name__", type(self.scorer).__name__)


IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Purpose(StrEnum):
    """Why an episode is played."""

    TRAINING = "training"
    """To be trained on."""
    GREEDY = "greedy"
    """To be compared with the episodes of its group. It is played at temperature 0 and never trained on."""
    EVALUATION = "evaluation"
    """To see how the team does on a held-out task. Its rows are in a store of the evaluation, never in the run's."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """From offset `start` on, the tokens of a response were sampled by policy version `version`."""

    start: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCall:
    """One LLM call when it is sent: who asks, and its place in the episode. Each field but `tags` can be a column."""

    sample_id: SampleId
    episode: EpisodeId
    agent: AgentName
    policy: PolicyName
    parent: SampleId | None = None
    """The turn whose tokens (prompt and response) this prompt extends, if any."""
    call: int = 0
    """Number of the call among its agent's calls in the episode."""
    act_hop: int | None = None
    """The hop of the first call of its act; None: it is an act by itself."""
    turn: int = 0
    """Number of its act in the episode, unless the workflow gave another; in a tree of turns, its depth."""
    branch: str = ""
    """The conversation that it belongs to; in a tree of turns, the path that it was sampled from (its own, with a
    number, for later calls of a candidate). Equal branches of an agent or a tree begin with the same context."""
    path: tuple[int, ...] = ()
    """Index of the candidate at each turn, from the root of a tree of turns to its own; empty outside trees."""
    context_hash: str = ""
    """16 hex digits; equal for calls of one policy with equal prompts."""
    after: tuple[int, ...] = ()
    """Hops of the calls that it directly depends on."""
    tool_s: float = 0.0
    """Seconds that the tool took whose result is new in its prompt."""
    purpose: Purpose = Purpose.TRAINING
    """Why its episode is played."""
    tags: Mapping[str, Scalar] = field(default_factory=dict)
    """The workflow's own tags, by which credit may group: `seat.act(text, anchor="room 3")`."""

    @property
    def hop(self) -> int:
        """Number of the call among all calls of the episode."""
        return split_sample_id(self.sample_id)[1]

    def shared(self) -> dict[str, Any]:
        """The fields of a SentCall by name, to make a turn of it."""
        return dict(zip(_SHARED, _shared_of(self), strict=True))


_SHARED = tuple(each.name for each in fields(SentCall))
_shared_of = attrgetter(*_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn(SentCall):
    """A turn without tokens, log-probabilities and text, which the store has. Credit and scheduling need no more."""

    num_prompt_tokens: int
    num_tokens: int
    """Number of sampled tokens."""
    versions: tuple[VersionRun, ...]
    finish: FinishReason
    valid: bool = True
    """True if the reply could be parsed and its tool call run."""

    @property
    def version(self) -> Version:
        """Policy version at the turn's first token."""
        return self.versions[0].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(SentCall):
    """One LLM call. Its ids are never re-tokenised: training sees what the engine saw and sampled."""

    prompt_ids: IntArray
    """[P] int32, the exact ids the engine was given."""
    response_ids: IntArray
    """[R] int32, the exact ids it sampled, the stop token included."""
    logprobs: FloatArray
    """[R] float32, under the distribution that was sampled from (temperature and filters applied)."""
    raw_logprobs: FloatArray
    """[R] float32, under the model's own distribution (temperature 1, no filters): what a trainer recomputes."""
    versions: tuple[VersionRun, ...]
    """One run unless the weights changed mid-turn; the first starts at 0."""
    finish: FinishReason
    valid: bool = True
    """True if the reply could be parsed and its tool call run."""
    text: str = ""
    """The decoded response without special tokens; for people and parsers, never for training."""

    def __post_init__(self) -> None:
        """Raises ValueError for arrays of different lengths, or version runs that do not start at offset 0."""
        lengths = {len(self.response_ids), len(self.logprobs), len(self.raw_logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"turn {self.sample_id}: ids and logprobs differ in length: {sorted(lengths)}")
        if not self.versions or self.versions[0].start != 0:
            raise ValueError(f"turn {self.sample_id}: versions must start at offset 0, got {self.versions}")

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.response_ids)

    def without_tokens(self) -> PlayedTurn:
        """A copy without tokens, log-probabilities and text, to keep in memory once the store has the row."""
        return PlayedTurn(
            **self.shared(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            versions=self.versions,
            finish=self.finish,
            valid=self.valid,
        )

    @property
    def version(self) -> Version:
        """Policy version at the turn's first token; with the sample id it is unique in the agent's table."""
        return self.versions[0].version


AnyTurn = Turn | PlayedTurn
"""Type of a turn in code that reads no tokens."""


LARGEST_REWARD = 1e6
"""Largest absolute value of one part of a turn's reward. Sums of rewards up to this size still resolve differences of
1e-6, the filters' tolerance. Their squares, which critics learn from, stay far inside the range of float32."""


LONGEST_LABEL = 160
"""Most characters of a failure's text: it must fit into a line of the screen together with counts."""


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


STOPPED = "stopped"
"""Kind of the failure of an episode whose group the run stopped while it played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode was not finished. Failures of one kind at one place are counted together.

    >>> str(Failure(kind="ValueError", text="boom", place="team.py:61"))
    'ValueError: boom (team.py:61)'
    """

    kind: str
    """Name of the exception's type; without an exception `timed_out`, `unrewarded`, `never_awaited`, `cancelled`,
    `worker_lost` or STOPPED."""
    text: str = ""
    """The exception's text, one line of at most LONGEST_LABEL characters. It may differ between failures of a kind."""
    place: str = ""
    """File and line of the code that raised it, e.g. `team.py:61`; empty if no code did."""

    def __str__(self) -> str:
        return f"{self.kind}{self.text and ': '}{self.text}{self.place and f' ({self.place})'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One multi-agent trajectory. A failed episode is a record too: it has a reason and is never trained on."""

    episode: EpisodeId
    """Equal to the trajectory id, e.g. `g12e3a0`."""
    group: GroupId
    task: str
    """`Task.input_id`."""
    status: EpisodeStatus
    reason: str = ""
    """Why it failed; empty when it finished."""
    failure: Failure | None = None
    """The same, to be counted; None when it finished."""
    turns: tuple[AnyTurn, ...] = ()
    """Turns of all agents, in hop order. Failed calls are not turns. The turns have no tokens if a store has them."""
    rewards: Mapping[SampleId, float | None] = field(default_factory=dict)
    """Reward of every turn; None if the workflow gave none."""
    call_rewards: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """The parts that the workflow gave to the turn itself, by name. The other rewards went to its agent or the team."""
    parts: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """The parts that a turn's reward adds up from, by name; `outcome` unless the workflow named another."""
    signals: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """The signals found in each turn, `tool_error` ... in [0, 1], `tool_calls` and `tool_cost`."""
    untrained: Mapping[SampleId, str] = field(default_factory=dict)
    """Calls with sampled tokens that are no turns, each with the reason: nobody read the answer, or it is a summary
    that is not trained on."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that the workflow reported with `team.report(...)`; `success` is the team's score of the episode."""
    duration_s: float = 0.0
    """Seconds from start to end, including waits for engines and for new versions (`pipeline.ahead`)."""

    @property
    def finished(self) -> bool:
        """True if training may use the episode."""
        return self.status is EpisodeStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the run stopped it while it played: its last step was done, or its group was late."""
        return self.failure is not None and self.failure.kind == STOPPED

    @property
    def reason_and_place(self) -> str:
        """The reason, with file and line if they are known, e.g. `ValueError: boom (team.py:61)`."""
        return f"{self.reason} ({self.failure.place})" if self.failure and self.failure.place else self.reason

    def without_tokens(self) -> "Episode":
        """A copy to keep in memory once the store has the rows: a long trajectory has megabytes of tokens."""
        return replace(
            self, turns=tuple(turn.without_tokens() if isinstance(turn, Turn) else turn for turn in self.turns)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """All episodes of one task in one step: the unit of admission, windowing and credit."""

    group: GroupId
    task: Task
    step: int
    attempt: int = 0
    purpose: Purpose = Purpose.TRAINING
    """Why its episodes are played; the play `greedy` has a purpose of its own."""
    episodes: tuple[Episode, ...] = ()
    greedy: Episode | None = None
    """One more play, at temperature 0, with which credit compares the episodes. Never trained on, never counted."""

    @property
    def finished(self) -> tuple[Episode, ...]:
        """The episodes that training may use."""
        return tuple(episode for episode in self.episodes if episode.finished)

    @property
    def plays(self) -> tuple[Episode, ...]:
        """All episodes, and the greedy play if there is one."""
        return self.episodes if self.greedy is None else (*self.episodes, self.greedy)
