"""Runs the asyncio tasks of workflows, so that user code can neither end the event loop nor outlive its episode.

consumes     the workflow of an episode, and all tasks that are made within it
waits for    the end of a task that was cancelled, for a grace period
produces     one task for the workflow; it and the tasks made within it belong to the episode
unblocked by the end of the task, or of the grace period

The coroutine of each task is driven through a `_Guarded` one:

    it calls sys.exit()     its task raises EpisodeError; asyncio would end the whole event loop
    it has been given up    it is never resumed again, even if it ignores CancelledError
    it ends                 its creator knows of the calls that it knew of (episode_log.py)

As long as one such task lives, the loop makes its tasks through a `_Factory`, and then through its earlier factory.
"""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from flexmarl.agents.episode_log import SCOPE, Scope
from flexmarl.errors import EpisodeError, users_line

_TASKS: ContextVar["WorkflowTasks | None"] = ContextVar("tasks", default=None)
"""Tasks of the episode whose code runs; None while the system works for the episode."""


class WorkflowTasks:
    """The tasks of one episode."""

    def __init__(self) -> None:
        self.live: dict[_Guarded, None] = {}
        """Tasks that have not ended, in the order in which they were made."""

    def start(self, run: Callable[..., Awaitable[object]], *args: object, name: str) -> "asyncio.Task[None]":
        """Starts the workflow in a task of its own."""

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
        """Cancels the workflow. Returns True if it ended within the grace period; if not, it is given up.

        All other tasks of the episode that were cancelled and still run are then given up too. A task that nobody
        cancelled is left alone: it may serve other episodes.
        """
        workflow.cancel()
        try:
            await asyncio.wait([workflow], timeout=grace_s)
        finally:
            ended = workflow.done()
            if not ended:
                for guarded in list(self.live):
                    # `uncancel` resets what `cancelling` counts, but the workflow was cancelled for certain.
                    if guarded.task is workflow or guarded.task.cancelling():
                        guarded.give_up()
        return ended


async def end_leftover_tasks(grace_s: float) -> None:
    """Cancels all tasks of episodes that still live on this loop; gives up those that outlive the grace period."""
    factory = asyncio.get_running_loop().get_task_factory()
    if not isinstance(factory, _Factory):
        return
    tasks = [guarded.task for guarded in factory.live]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=grace_s)
    for guarded in list(factory.live):
        guarded.give_up()
    await asyncio.wait(tasks, timeout=grace_s)


class Outside:
    """Marks a block in which the system works for a workflow: tasks made in it do not belong to the episode."""

    __slots__ = ("_scope", "_tasks")  # A class, as every call enters two: a generator would take three times as long.

    def __enter__(self) -> None:
        self._tasks, self._scope = _TASKS.set(None), SCOPE.set(None)

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # A discarded coroutine may be closed in another context.
            SCOPE.reset(self._scope)
            _TASKS.reset(self._tasks)


class _Guarded(Coroutine[Any, Any, Any]):
    """A wrapper around a coroutine of an episode; the task runs the wrapper."""

    task: "asyncio.Task[Any]"

    def __init__(self, coroutine: Coroutine[Any, Any, Any], tasks: WorkflowTasks, creator: Scope, factory: "_Factory"):
        self.scope = creator.begun()
        self._coroutine, self._tasks, self._creator, self._factory = coroutine, tasks, creator, factory
        self._given_up = False
        tasks.live[self] = factory.live[self] = None

    def send(self, value: Any) -> Any:
        """Resumes the coroutine."""
        return self._resumed(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Resumes the coroutine with an error; that of a cancelled task is a CancelledError."""
        return self._resumed(self._coroutine.throw, *error)

    def close(self) -> None:
        """Ends the coroutine at its present place. If it refuses to end, it stays there and is never resumed."""
        stack = list(_stack(self._coroutine))
        try:
            self._coroutine.close()
        except KeyboardInterrupt:
            raise
        except BaseException:  # Its `finally` blocks may raise anything; nobody waits for it any more.
            for one in stack:
                _keep_for_ever(one)
        finally:
            self._end()

    def give_up(self) -> None:
        """Makes sure that the coroutine is never resumed: its task ends the next time it would resume it."""
        self._given_up = True
        self.task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # Frame and name, which tools that show a task's state read.

    def _resumed(self, resume: Callable[..., Any], *given: Any) -> Any:
        if self._given_up:
            self.close()
            raise asyncio.CancelledError("the episode has given it up")
        try:
            return resume(*given)
        except SystemExit as error:
            self._end()
            raise EpisodeError(f"the workflow called sys.exit({error.code!r}); raise an error to fail") from error
        except BaseException:  # Also a StopIteration: the coroutine has ended.
            self._end()
            raise

    def _end(self) -> None:
        self._creator.learn(self.scope)
        self._tasks.live.pop(self, None)
        self._factory.remove(self)


def _keep_for_ever(coroutine: Any) -> None:
    """Never frees a coroutine that refused to close: Python would close it again when it frees it, or at exit."""
    if getattr(coroutine, "cr_frame", None) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _stack(coroutine: Any) -> Iterator[Any]:
    """The coroutine, the coroutine that it awaits, and so on."""
    while coroutine is not None:
        yield coroutine
        coroutine = getattr(coroutine, "cr_await", None)


def waits_at(workflow: "asyncio.Task[Any]") -> str:
    """File and line of the user's code at which a workflow waits, e.g. `team.py:61`; "" if it is not known."""
    frames = [frame for one in _stack(workflow.get_coro()) if (frame := getattr(one, "cr_frame", None)) is not None]
    return users_line([(frame.f_code.co_filename, frame.f_lineno) for frame in frames])


class _Factory:
    """Makes a loop's tasks as before, but guards each task made within a workflow and gives it a scope of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._before = loop, loop.get_task_factory()
        self.live: dict[_Guarded, None] = {}
        """Guarded tasks of all episodes, in the order in which they were made."""

    @classmethod
    def install(cls, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the loop use a `_Factory` for its tasks from now on."""
        if not isinstance(loop.get_task_factory(), cls):
            loop.set_task_factory(cls(loop))

    def remove(self, guarded: _Guarded) -> None:
        """Removes a task that has ended. When none is left, gives the loop its earlier factory back."""
        self.live.pop(guarded, None)
        if not self.live and self._loop.get_task_factory() is self:
            self._loop.set_task_factory(self._before)

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, /, **kwargs: Any) -> Any:
        tasks, creator = _TASKS.get(), SCOPE.get()
        if tasks is None or creator is None or not asyncio.iscoroutine(coroutine):
            return self._made(loop, coroutine, **kwargs)
        guarded = _Guarded(coroutine, tasks, creator, self)
        # A task copies the context variables when it is made.
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
