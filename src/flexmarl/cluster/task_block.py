"""Task group for the block that it is opened in: the block's own error leaves it as itself, not inside a group."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_block() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose tasks end with the block. Leaving it early, by an error or a cancellation, cancels them.

    A task that fails ends the block as in any TaskGroup, with an exception group.

    >>> async def fail():
    ...     async with task_block():
    ...         raise ValueError("of the block")
    >>> asyncio.run(fail())
    Traceback (most recent call last):
    ...
    ValueError: of the block
    """
    failure: BaseException | None = None
    started = _Started()
    async with started:
        try:
            yield started
        except BaseException as error:
            failure = error
            started.cancel_all()
    if failure is not None:
        raise failure


class _Started(asyncio.TaskGroup):
    """Remembers its tasks, in order to cancel them."""

    def __init__(self) -> None:
        super().__init__()
        self._running: set[asyncio.Task[object]] = set()

    def create_task(self, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        task = super().create_task(*args, **kwargs)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel_all(self) -> None:
        """Cancels every task that runs."""
        for task in list(self._running):
            task.cancel()
