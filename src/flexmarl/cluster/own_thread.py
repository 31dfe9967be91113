"""Thread for a library that blocks: one for all its calls, and a wait for one of them may end before the call does."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


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
