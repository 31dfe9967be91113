"""Threads for work that blocks, and task groups for work that runs next to a block.

DeviceThread   the one thread per device for all torch work of a process
OwnThread      one thread for all calls of a library that blocks; a wait for a call may end before the call does
task_block     a task group for one block, whose own error leaves it as itself, not inside an exception group
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Thread for torch work: the event loop stays free, and engine and trainer never compete for the same cores.

    Work runs in the order in which it was given. Engines give a few decode steps at a time and trainers one forward
    pass, so that neither waits long for the other.
    """

    def __init__(self, name: str = "device", *, first: Callable[[], None] | None = None) -> None:
        """`first` is called on the thread, before this returns."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        if first is not None:
            self._executor.submit(first).result()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `work` on the thread and returns its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Waits for the work that has started, cancels the rest and ends the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class OwnThread:
    """One thread for all calls of a library, alive from construction to `close`.

    Not an executor: Python waits for executors at exit, and a stuck call never ends. Not one thread per call: a child
    started with PR_SET_PDEATHSIG dies when the *thread* that started it ends.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T], *, timeout: float) -> T:
        """Calls `work` on the thread, after earlier work.

        Raises TimeoutError `timeout` s after the call, the wait for earlier work included; the work still runs.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def resolve(settle: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():
                settle(outcome)

        def call() -> None:
            try:
                settle, outcome = done.set_result, work()
            except BaseException as error:
                settle, outcome = done.set_exception, error
            with suppress(RuntimeError):  # the event loop has ended, so nobody waits
                loop.call_soon_threadsafe(resolve, settle, outcome)

        self._work.put(call)
        async with asyncio.timeout(timeout):
            return await done

    def close(self) -> None:
        """Ends the thread after the work that it was given."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@asynccontextmanager
async def task_block() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup for one block, which ends when its tasks have. An error or a cancellation in the block cancels them.

    A task that fails ends the block as in any TaskGroup: with an exception group, which also holds the block's error.
    Before Python 3.13 a group whose task fails while the block's end waits for it leaves a request of cancellation
    behind, and timeouts around the block take it for somebody's: they raise CancelledError where TimeoutError is due.
    This leaves none.

    >>> async def fail():
    ...     async with task_block():
    ...         raise ValueError("of the block")
    >>> asyncio.run(fail())
    Traceback (most recent call last):
    ...
    ValueError: of the block
    """
    failure: Exception | None = None
    here = asyncio.current_task()
    assert here is not None, "a block is in a task"
    before = here.cancelling()
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield tasks
            except Exception as error:
                failure = error
                raise
    except ExceptionGroup as group:
        while sys.version_info < (3, 13) and here.cancelling() > before:
            here.uncancel()
        if group.exceptions != (failure,):
            raise
    if failure is not None:  # Raised outside the `except`, so that the group is not its context.
        raise failure
