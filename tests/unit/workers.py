"""A worker in this process: what crosses is pickled, and arrays arrive read-only, as from shared memory."""

import asyncio
import os
import pickle
from collections.abc import Callable
from typing import Any

from flexmarl.cluster.interface import WorkerPlace
from flexmarl.errors import WorkerError


def crossed(thing: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


class LocalWorker:
    """Dies when told to; then calls under way and later ones raise WorkerError."""

    def __init__(self, make: Callable[[], Any], *, name: str = "engine/solver/0", latency_s: float = 0.0) -> None:
        self.name, self.place = name, WorkerPlace(node="127.0.0.1", pid=os.getpid())
        self.hosted = crossed(make)()
        self.calls: list[str] = []
        """Methods that were asked for, in order."""
        self.largest = 0
        """Most calls of `collect` under way at once."""
        self._latency_s = latency_s
        self._collects = 0
        self._dead = asyncio.Event()
        self._hangs = False
        self.stopped = False

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if self._dead.is_set():
            raise WorkerError(f"{self.name} is gone")
        work = asyncio.ensure_future(self._work(method, crossed(args)))
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
        if self._dead.is_set():
            work.cancel()
            raise WorkerError(f"{self.name} died in {method}")
        return crossed(work.result())

    async def stop(self) -> None:
        self.stopped = True
        self.die()

    def die(self) -> None:
        self._dead.set()

    def hang(self) -> None:
        """From now on nothing comes back."""
        self._hangs = True

    async def _work(self, method: str, args: tuple[Any, ...]) -> Any:
        self._collects += method == "collect"
        self.largest = max(self.largest, self._collects)
        try:
            await asyncio.sleep(self._latency_s)
            answer = await getattr(self.hosted, method)(*args)
            await asyncio.sleep(self._latency_s)
            if self._hangs:
                await asyncio.Event().wait()
            return answer
        finally:
            self._collects -= method == "collect"
