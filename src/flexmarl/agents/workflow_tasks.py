"""Runs the asyncio tasks of workflows, so that code of a user's ends what it must not, and outlives it, in no way.

consumes     the workflow of an episode, and whatever tasks are made within it
waits for    the end of a task that was cancelled, for a grace period
produces     one task for the workflow; all of these tasks are the episode's own
unblocked by the end of the task, or of the grace period

The coroutine of each task is driven through a `_Guarded` one:

    sys.exit() in it        is an EpisodeError of that task; asyncio would end the whole event loop
    it has been given up    it is never resumed again, however it treats a CancelledError
    it ends                 its creator knows of the calls that it knew of (causality.py)

The loop makes its tasks through a factory of ours for as long as one of these lives, and then as it did before.
"""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from flexmarl.agents.ledger import SCOPE, Scope
from flexmarl.errors import EpisodeError

_TASKS: ContextVar["WorkflowTasks | None"] = ContextVar("tasks", default=None)
"""Those of the episode whose code runs; None in what the system does for it."""


class WorkflowTasks:
    """The tasks of one episode."""

    def __init__(self) -> None:
        self.live: dict[_Guarded, None] = {}
        """In the order in which they were made."""

    def start(self, run: Callable[..., Awaitable[object]], *args: object, name: str) -> "asyncio.Task[None]":
        """Begins the workflow, in a task of its own."""

        async def play() -> None:
            await run(*args)

        _Factory.install(asyncio.get_running_loop())
        tasks, scope = _TASKS.set(self), SCOPE.set(Scope())
        try:
            return asyncio.create_task(play(), name=name)
        finally:
            SCOPE.reset(scope)
            _TASKS.reset(tasks)

    async def end(self, workflow: "asyncio.Task[None]", grace_s: float) -> bool:
        """Cancels the workflow; returns whether it ended within the grace period. If not, it is given up.

        With it goes every task that was cancelled too and went on. What nobody has cancelled is left alone: it may
        serve other episodes.
        """
        workflow.cancel()
        try:
            await asyncio.wait([workflow], timeout=grace_s)
        finally:
            ended = workflow.done()
            if not ended:
                for guarded in list(self.live):
                    # One that calls `uncancel` has, by its count, not been cancelled; the workflow has.
                    if guarded.task is workflow or guarded.task.cancelling():
                        guarded.give_up()
        return ended


async def end_left_behind(grace_s: float) -> None:
    """Cancels the tasks of all episodes that still live on this loop; those that outlive the grace are given up."""
    factory = asyncio.get_running_loop().get_task_factory()
    if not isinstance(factory, _Factory):
        return
    left = [guarded.task for guarded in factory.live]
    for task in left:
        task.cancel()
    await asyncio.wait(left, timeout=grace_s)
    for guarded in list(factory.live):
        guarded.give_up()
    await asyncio.wait(left, timeout=grace_s)


@contextmanager
def outside() -> Iterator[None]:
    """In the block the system works for a workflow: tasks that are made in it are none of the episode's."""
    tasks, scope = _TASKS.set(None), SCOPE.set(None)
    try:
        yield
    finally:
        with suppress(ValueError):  # A coroutine that is thrown away is closed in whatever context that happens.
            SCOPE.reset(scope)
            _TASKS.reset(tasks)


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine of an episode, as its task sees it."""

    task: "asyncio.Task[Any]"

    def __init__(self, coroutine: Coroutine[Any, Any, Any], tasks: WorkflowTasks, creator: Scope, factory: "_Factory"):
        self.scope = creator.begun()
        self._coroutine, self._tasks, self._creator, self._factory = coroutine, tasks, creator, factory
        self._given_up = False
        tasks.live[self] = factory.live[self] = None

    def send(self, value: Any) -> Any:
        """Resumes it."""
        return self._resumed(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Resumes it with an error, which for a task that was cancelled is a CancelledError."""
        return self._resumed(self._coroutine.throw, *error)

    def close(self) -> None:
        """Ends it where it stands. Code that refuses to end is left standing there."""
        stack = list(_stack(self._coroutine))
        try:
            self._coroutine.close()
        except KeyboardInterrupt:
            raise
        except BaseException:  # Whatever its `finally` blocks raise: nobody waits for it any more.
            for one in stack:
                _keep_for_ever(one)
        finally:
            self._end()

    def give_up(self) -> None:
        """It is not resumed any more: its task ends the next time it would be."""
        self._given_up = True
        self.task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # Frame and name, for whoever shows what a task does.

    def _resumed(self, resume: Callable[..., Any], *given: Any) -> Any:
        if self._given_up:
            self.close()
            raise asyncio.CancelledError("the episode has given it up")
        try:
            return resume(*given)
        except SystemExit as error:
            self._end()
            raise EpisodeError(f"the workflow called sys.exit({error.code!r}); raise an error to fail") from error
        except BaseException:  # A StopIteration, too: it has ended.
            self._end()
            raise

    def _end(self) -> None:
        self._creator.learn(self.scope)
        self._tasks.live.pop(self, None)
        self._factory.leave(self)


def _keep_for_ever(coroutine: Any) -> None:
    """What would not be closed would be asked again when it is collected, and at last while the interpreter ends."""
    if getattr(coroutine, "cr_frame", None) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _stack(coroutine: Any) -> Iterator[Any]:
    """The coroutine, the one that it awaits, and so on."""
    while coroutine is not None:
        yield coroutine
        coroutine = getattr(coroutine, "cr_await", None)


class _Factory:
    """Makes a loop's tasks as they were made before; each within a workflow is guarded and has a scope of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._before = loop, loop.get_task_factory()
        self.live: dict[_Guarded, None] = {}
        """Of all episodes, in the order in which they were made."""

    @classmethod
    def install(cls, loop: asyncio.AbstractEventLoop) -> None:
        """From now on the loop makes its tasks through a factory of ours."""
        if not isinstance(loop.get_task_factory(), cls):
            loop.set_task_factory(cls(loop))

    def leave(self, guarded: _Guarded) -> None:
        """A task has ended; when none is left, the loop makes its tasks as before."""
        self.live.pop(guarded, None)
        if not self.live and self._loop.get_task_factory() is self:
            self._loop.set_task_factory(self._before)

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, /, **kwargs: Any) -> Any:
        tasks, creator = _TASKS.get(), SCOPE.get()
        if tasks is None or creator is None or not asyncio.iscoroutine(coroutine):
            return self._made(loop, coroutine, **kwargs)
        guarded = _Guarded(coroutine, tasks, creator, self)
        # A task keeps a copy of the variables as they are when it is made.
        token = SCOPE.set(guarded.scope)
        try:
            guarded.task = self._made(loop, guarded, **kwargs)
        finally:
            SCOPE.reset(token)
        return guarded.task

    def _made(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> Any:
        if self._before is None:
            return asyncio.Task(coroutine, loop=loop, **kwargs)
        return self._before(loop, coroutine, **kwargs)
