"""Task group for the block that it is opened in: the block's own error leaves it as itself, not inside a group."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
