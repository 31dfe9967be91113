"""What one episode is played with."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexmarl.agents.recorder import NoRecorder, Recorder
from flexmarl.records import EpisodeId, Generation, GenerationRequest, GroupId, Scalar, Task
from flexmarl.tasks import Environment

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
