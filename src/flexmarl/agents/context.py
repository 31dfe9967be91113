"""Decides the seed of every call, from what the call is, never from when it is sent.

Parallel calls finish in any order and a resumed run plays its groups again: both must sample the same tokens.

Decides what an agent remembers of its earlier acts in an episode.

Who is told of every call as it happens.

What one episode is played with.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field

from flexmarl.records import (
    AgentName,
    EpisodeId,
    Generation,
    GenerationRequest,
    GroupId,
    IntArray,
    PolicyName,
    SampleId,
    Scalar,
    Task,
    Turn,
)
from flexmarl.tasks import Environment


def context_hash(policy: str, prompt_ids: IntArray) -> str:
    """16 hex digits for the policy and the exact prompt ids: equal where, and only where, the context is."""
    digest = hashlib.blake2b(policy.encode() + b"\0", digest_size=8)
    digest.update(prompt_ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()


def call_seed(run_seed: int, trajectory_id: str, agent: str, context: str, nth: int) -> int:
    """63-bit seed of the nth call of this agent with this context in the episode.

    The trajectory id (`g12e3a0`) says group, episode and attempt.
    """
    return _hash(run_seed, trajectory_id, agent, context, nth)


def episode_seed(run_seed: int, trajectory_id: str) -> int:
    """63-bit seed of the workflow's own random numbers."""
    return _hash(run_seed, trajectory_id)


def task_seed(input_id: str) -> int:
    """63-bit seed of what all episodes of a task have in common, such as where its environment starts."""
    return _hash("task", input_id)


def _hash(*parts: int | str) -> int:
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


T = TypeVar("T")

Memory = Literal["none", "full"] | Annotated[int, Field(ge=1)]
"""`none`: every act starts anew from the role prompt; `full`: everything; n: the last n acts."""


def recall(memory: Memory, acts: Sequence[T]) -> Sequence[T]:
    """The acts that the next one starts from, oldest first.

    >>> recall(2, ["a", "b", "c"])
    ['b', 'c']
    """
    if memory == "none":
        return acts[:0]
    return acts if memory == "full" else acts[-memory:]


TurnOf = Callable[[Generation], Turn]
"""Makes a turn of what there is of a call's answer."""


class Recorder(Protocol):
    """Called by the seats of one or many episodes, in any interleaving; for one sample id `prompt` comes first.

    A call that fails has a prompt and never a turn; what was sampled of its answer is told nevertheless, so that every
    token that an engine sampled is accounted for. What a recorder raises ends the episode.
    """

    async def prompt(
        self,
        *,
        sample_id: SampleId,
        agent: AgentName,
        policy: PolicyName,
        prompt_ids: IntArray,
        parent: SampleId | None,
        tags: Mapping[str, Scalar],
    ) -> None:
        """A call is about to be sent, and does not wait for a disk. Its prompt begins with prompt and response of the
        turn `parent`, if any.
        """
        ...

    async def turn(self, turn: Turn) -> None:
        """It was answered."""
        ...

    async def failed(self, turn: Turn, because: str) -> None:
        """It ended in an abort or an error, or nothing could be made of its answer; `turn` is what was sampled."""
        ...

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """The workflow has left it; what was sampled of it is soon there."""
        ...


class NoRecorder:
    """Recorder that keeps nothing."""

    async def prompt(
        self,
        *,
        sample_id: SampleId,
        agent: AgentName,
        policy: PolicyName,
        prompt_ids: IntArray,
        parent: SampleId | None,
        tags: Mapping[str, Scalar],
    ) -> None:
        """Nothing."""

    async def turn(self, turn: Turn) -> None:
        """Nothing."""

    async def failed(self, turn: Turn, because: str) -> None:
        """Nothing."""

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """Nothing."""


Interrupted = Callable[["asyncio.Future[Generation]"], None]
"""Called when a call is cancelled that an engine works on, with the future of what there is of its answer. That is
aborted, and soon there."""


def forget(answer: "asyncio.Future[Generation]") -> None:
    """Nobody wants to know what there is of the answer."""


class Generate(Protocol):
    """Serves calls, any number at once. A call that cannot be served comes back with finish `error`."""

    def __call__(self, request: GenerationRequest, /, *, interrupted: Interrupted = forget) -> Awaitable[Generation]:
        """Answers one call."""
        ...


@dataclass(frozen=True, slots=True)
class Node:
    """A candidate in a tree of turns (agents/tree_sampling.py)."""

    path: tuple[int, ...]
    """Which candidate it is, of each turn from the root to its own."""

    @property
    def name(self) -> str:
        """E.g. `0.3.1`."""
        return ".".join(map(str, self.path))

    def tags(self, nth: int) -> dict[str, Scalar]:
        """Tags of its nth call. `branch` is where that was sampled from: calls with one branch have one context.

        >>> Node((0, 3, 1)).tags(0)
        {'turn': 2, 'path': '0.3.1', 'branch': '0.3'}
        >>> Node((0, 3, 1)).tags(1)["branch"]
        '0.3.1:1'
        """
        branch = Node(self.path[:-1]).name if nth == 0 else f"{self.name}:{nth}"
        return {"turn": len(self.path) - 1, "path": self.name, "branch": branch}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """One play of one task: which, and what its seats reach the world through."""

    task: Task
    group: GroupId
    trajectory_id: str
    """From `make_trajectory_id`; group, episode and attempt are in it, so seeds need no more."""
    run_seed: int
    generate: Generate
    recorder: Recorder = field(default_factory=NoRecorder)
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    """Fields of `Sampling` that override every agent's own, e.g. {"temperature": 0.0} in an evaluation."""
    tags: Mapping[str, Scalar] = field(default_factory=dict)
    """Tags of every turn, e.g. {"greedy": True}."""
    trains: bool = True
    """False: played to see how the team does; nothing of it is trained on, so nothing is sampled for comparison."""

    environment: Callable[[Task], Environment[Any]] | None = None
    """Makes the environment that the task is played in, where there is one."""
    node: Node | None = None
    """Where in a tree of turns the team plays, if it plays in one."""

    @property
    def episode(self) -> EpisodeId:
        """The trajectory id, as the episode's name."""
        return EpisodeId(self.trajectory_id)

    @property
    def stream(self) -> str:
        """What the seeds of its calls depend on: in a tree, each candidate has random numbers of its own."""
        return f"{self.trajectory_id}/{self.node.name}" if self.node else self.trajectory_id
