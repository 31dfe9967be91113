"""Runs the scorers of a run's episodes, those that are functions and those that must be waited for.

consumes     a task, and an answer to it
waits for    the scorer: a coroutine of the user's, or a box; equal answers to a task wait for the first of them
produces     a finite number, 1.0 for a full success
unblocked by the scorer, or by the time limit of its box; the episode's time limit bounds it
"""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.records.scorers import Scorer
from flexmarl.sandbox.interface import Sandbox

BOXES = 2 * (os.cpu_count() or 1)
"""Answers that are scored in boxes at one time, in each process. More would only start more slowly."""
MOST_KEPT = 10_000
"""Scores that are kept; the oldest go first."""


@runtime_checkable
class BoxedScorer(Protocol):
    """A scorer that runs what a model wrote: a run with it begins only where boxes are safe."""

    async def score_in_box(self, answer: str, reference: str, sandbox: Sandbox) -> float:
        """The score. Raises EpisodeError for a fault that is not the answer's; such an answer has no score."""
        ...


def needs_box(scorer: Scorer | str) -> bool:
    """True for a scorer that opens boxes."""
    return isinstance(scorer, BoxedScorer)


class Scores:
    """Scores answers for all episodes of a process."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """`sandbox`: for scorers that need one."""
        self._sandbox = sandbox
        self._kept: dict[tuple[str, str, str], float] = {}
        self._places = asyncio.Semaphore(BOXES)
        self._turns: dict[tuple[str, str, str], asyncio.Lock] = {}

    async def score(self, task: Task, answer: str) -> float:
        """The score of an answer. Scorers that must be waited for are asked once for equal answers to a task."""
        if not isinstance(task.scorer, BoxedScorer) and not inspect.iscoroutinefunction(task.scorer):
            return task.score(answer)
        key = (task.input_id, task.reference, answer)
        async with self._turn(key):
            if key not in self._kept:
                self._kept[key] = task.checked_score(await self._awaited(task, answer))
                if len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
            return self._kept[key]

    async def _awaited(self, task: Task, answer: str) -> float:
        if not isinstance(task.scorer, BoxedScorer):
            assert inspect.iscoroutinefunction(task.scorer), "the caller has looked"
            return await task.scorer(answer, task.reference)
        if self._sandbox is None:
            raise EpisodeError(
                f"task {task.input_id}: its scorer runs code of a model and needs a sandbox; flexmarl gives it one in "
                f"a run whose first tasks have such a scorer"
            )
        async with self._places:
            return await task.scorer.score_in_box(answer, task.reference, self._sandbox)

    @asynccontextmanager
    async def _turn(self, key: tuple[str, str, str]) -> AsyncIterator[None]:
        """Holds the only place for answers with this key."""
        turn = self._turns.setdefault(key, asyncio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked() and self._turns.get(key) is turn:
                del self._turns[key]
