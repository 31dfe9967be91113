"""Threads and task groups in which the package runs what blocks, and what runs beside it.

The one thread per device through which all torch work of a process goes.

Thread for a library that blocks: one for all its calls, and a wait for one of them may end before the call does.

Task group for the block that it is opened in: the block's own error leaves it as itself, not inside a group.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Thread for torch work: the event loop stays free, and engine and trainer never fight for the same cores.

    Work is done in the order it was given. Engines give it a few decode steps at a time and trainers one forward pass,
    so that neither waits long for the other.
    """

    def __init__(self, name: str = "device") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `work` on the thread and returns what it returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Waits for the work that has started and ends the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class OwnThread:
    """Lives from `start` to `close`. Not an executor: at exit Python waits for those, and a stuck call never ends.

    Not a thread per call either: what a thread started with the wish to die with its parent dies with that thread.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T], *, timeout: float) -> T:
        """Calls `work` there, after what was given earlier. Raises TimeoutError if it takes longer than `timeout`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():
                settle(outcome)

        def call() -> None:
            try:
                settle, outcome = done.set_result, work()
            except BaseException as error:
                settle, outcome = done.set_exception, error
            with suppress(RuntimeError):  # the loop has ended, nobody waits
                loop.call_soon_threadsafe(tell, settle, outcome)

        self._work.put(call)
        async with asyncio.timeout(timeout):
            return await done

    def close(self) -> None:
        """Ends the thread after what it was given."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@asynccontextmanager
async def task_block() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose tasks end with the block. Leaving it early, by an error or a cancellation, cancels them.

    A task that fails ends the block as in any TaskGroup, with an exception group, which holds the block's error too.

    >>> async def fail():
    ...     async with task_block():
    ...         raise ValueError("of the block")
    >>> asyncio.run(fail())
    Traceback (most recent call last):
    ...
    ValueError: of the block
    """
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                yield tasks
            except Exception as error:
                failure = error
                raise
    except ExceptionGroup as group:
        if group.exceptions != (failure,):
            raise
    if failure is not None:  # Raised here, where no group is its context.
        raise failure
