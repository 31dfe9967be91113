"""The one thread per device through which all torch work of a process goes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

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
