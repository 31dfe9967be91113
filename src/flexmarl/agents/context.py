"""Context of one episode: the seed of every call, and who records the calls.

A seed depends on what the call is, never on when it is sent. Parallel calls finish in any order, and a resumed run
plays its groups again: both must sample the same tokens.

EpisodeContext holds all that an episode is played with. Its Recorder is called for every call as it happens.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexmarl.agents.doors import Doors
from flexmarl.records import (
    EpisodeId,
    Generation,
    GenerationRequest,
    GroupId,
    IntArray,
    Purpose,
    SampleId,
    SentCall,
    Task,
    Turn,
)
from flexmarl.sandbox.interface import Sandbox
from flexmarl.tasks import Environment
from flexmarl.tasks.scorers import Scores
from flexmarl.tools.open_tools import OpenTools


def context_hash(policy: str, prompt_ids: IntArray) -> str:
    """16 hex digits for the policy and the exact prompt ids: equal if, and only if, the contexts are equal."""
    digest = hashlib.blake2b(policy.encode() + b"\0", digest_size=8)
    digest.update(prompt_ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def call_seed(run_seed: int, trajectory_id: str, agent: str, context: str, nth: int) -> int:
    """63-bit seed of the nth call of this agent with this context in the episode.

    The trajectory id (`g12e3a0`) contains group, episode and attempt.
    """
    return _hash(run_seed, trajectory_id, agent, context, nth)


def episode_seed(run_seed: int, trajectory_id: str) -> int:
    """63-bit seed of the workflow's own random numbers."""
    return _hash(run_seed, trajectory_id)


def task_seed(input_id: str) -> int:
    """63-bit seed of everything that all episodes of a task share, such as the start of their environment."""
    return _hash("task", input_id)


def _hash(*parts: int | str) -> int:
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


TurnOf = Callable[[Generation], Turn]
"""Makes a turn of a call's answer, which may be incomplete."""


class Recorder(Protocol):
    """Records calls. The seats of one or many episodes call it in any interleaving; `prompt` comes first for a sample.

    For a call that fails, `prompt` is called and `turn` never is. Its sampled tokens come by `failed` or `interrupted`,
    so that every token that an engine sampled is accounted for. An error that a recorder raises ends the episode.
    """

    async def prompt(self, call: SentCall, prompt_ids: IntArray) -> None:
        """Called before a call is sent, which must not wait for a disk."""
        ...

    async def turn(self, turn: Turn) -> None:
        """Called when a call was answered."""
        ...

    async def failed(self, turn: Turn, because: str) -> None:
        """Called when a call was aborted or failed, or its answer could not be read; `turn` has the sampled tokens."""
        ...

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """Called when the workflow has left a call; `answer` will soon hold the tokens that were sampled."""
        ...


class NoRecorder:
    """Recorder that keeps nothing."""

    async def prompt(self, call: SentCall, prompt_ids: IntArray) -> None:
        """Does nothing."""

    async def turn(self, turn: Turn) -> None:
        """Does nothing."""

    async def failed(self, turn: Turn, because: str) -> None:
        """Does nothing."""

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """Does nothing."""


Interrupted = Callable[["asyncio.Future[Generation]"], None]
"""Called when a call is cancelled while an engine works on it. The engine aborts the call; the future will soon hold
the answer, with the tokens that were sampled."""


def forget(answer: "asyncio.Future[Generation]") -> None:
    """Ignores the answer of an interrupted call."""


OnTokens = Callable[[IntArray], None]
"""Called with the ids of an answer as they are sampled, those of its end excepted. An id that was given stays."""


class Generate(Protocol):
    """Serves calls, any number at once. A call that cannot be served comes back with finish `error`."""

    def __call__(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Awaitable[Generation]:
        """Answers one call. `on_tokens` is called if the engine and the way to it can tell what is sampled."""
        ...


@dataclass(frozen=True, slots=True)
class Node:
    """A candidate in a tree of turns (agents/patterns.py)."""

    path: tuple[int, ...]
    """Index of the candidate at each turn, from the root to its own turn."""

    @property
    def name(self) -> str:
        """The path as text, e.g. `0.3.1`."""
        return ".".join(map(str, self.path))

    def branch(self, nth: int) -> str:
        """The place that its nth call is sampled from: calls with one branch have one context.

        >>> Node((0, 3, 1)).branch(0), Node((0, 3, 1)).branch(1)
        ('0.3', '0.3.1:1')
        """
        return Node(self.path[:-1]).name if nth == 0 else f"{self.name}:{nth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """One play of one task: its identity, and the objects through which its seats reach engines and the store."""

    task: Task
    group: GroupId
    trajectory_id: str
    """From `make_trajectory_id`. It contains group, episode and attempt, so seeds need no more."""
    run_seed: int
    generate: Generate
    recorder: Recorder = field(default_factory=NoRecorder)
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    """Fields of `Sampling` that override every agent's own, e.g. {"temperature": 0.0} in an evaluation."""
    purpose: Purpose = Purpose.TRAINING
    """Why it is played. Candidates are sampled only to be compared in training."""
    environment: Callable[[Task], Environment[Any]] | None = None
    """Makes the environment that the task is played in, if there is one."""
    node: Node | None = None
    """The candidate that the team plays, if it plays in a tree of turns."""
    sandbox: Sandbox | None = None
    """Opens boxes for tools that need them."""
    scores: Scores = field(default_factory=Scores)
    """Scores answers; all episodes of a process share it."""
    tools: OpenTools = field(default_factory=OpenTools)
    """The tools that are open in the episode."""
    doors: Doors | None = None
    """Opens addresses at which programs play its seats, if the run has a gateway."""

    @property
    def episode(self) -> EpisodeId:
        """The trajectory id, as the episode's name."""
        return EpisodeId(self.trajectory_id)

    @property
    def stream(self) -> str:
        """Name of the random stream of its calls. In a tree, each candidate has a stream of its own."""
        return f"{self.trajectory_id}/{self.node.name}" if self.node else self.trajectory_id
