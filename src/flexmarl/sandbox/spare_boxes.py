"""Runs a pool of spare boxes, whose interpreters have started before anybody needs them; each serves once.

consumes     requests for boxes with the sandbox's own limits; all others go to the sandbox itself
waits for    nothing: without a spare, a box is started as ever
produces     boxes that are new to their users; for each that is taken, another spare
unblocked by the requests; a spare that nobody has taken in `IDLE_S` ends

The first request makes the first spares, so that a process without boxes has none. They end with their event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from flexmarl.errors import EpisodeError
from flexmarl.sandbox.interface import Box, Limits, Sandbox

IDLE_S = 60.0
"""Time that a spare waits for its user."""
STARTING = 2
"""Spares that start at the same time, so that they leave the processor to the boxes that are used."""
LEAST_TIME_S = 5.0
"""Longest answer of a spare that is asked whether it still lives."""


class SparePool:
    """A Sandbox that hands out spare boxes of another one. It can be pickled; another process has spares of its own."""

    def __init__(self, sandbox: Sandbox, spare: int) -> None:
        """`spare`: boxes that wait for their users."""
        self.sandbox, self.spare = sandbox, spare
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Spares] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return SparePool, (self.sandbox, self.spare)

    @asynccontextmanager
    async def open(
        self,
        files: Mapping[str, str | bytes] = {},
        limits: Limits | None = None,
        *,
        relay: Path | None = None,
        reads: Sequence[Path] = (),
    ) -> AsyncIterator[Box]:
        """Opens a box, a spare one if it may be. See `Sandbox`."""
        if limits is not None or relay is not None or reads:
            async with self.sandbox.open(files, limits, relay=relay, reads=reads) as box:
                yield box
            return
        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            self._of_loop[loop] = _Spares(self.sandbox, self.spare)
        spares = self._of_loop[loop]
        spare = await spares.taken()
        spares.fill()
        if spare is None:
            async with self.sandbox.open(files) as box:
                yield box
            return
        try:
            for name, content in files.items():
                await spare.box.write(name, content.encode() if isinstance(content, str) else content)
            yield spare.box
        finally:
            await asyncio.shield(spare.end())


class _Spares:
    """The spares of one event loop."""

    def __init__(self, sandbox: Sandbox, spare: int) -> None:
        self._sandbox, self._spare = sandbox, spare
        self._starting = asyncio.Semaphore(STARTING)
        self.waiting: set[_Spare] = set()
        """Spares that nobody has taken, some of them not ready."""
        self.ready: deque[_Spare] = deque()

    def fill(self) -> None:
        """Starts as many spares as are wanted."""
        while len(self.waiting) < self._spare:
            self.waiting.add(_Spare(self))

    async def taken(self) -> "_Spare | None":
        """A spare that lives, for the caller alone. None if none is ready."""
        while self.ready:
            spare = self.ready.popleft()
            spare.take()
            try:
                if not (await spare.box.run("", timeout_s=LEAST_TIME_S)).lost:
                    return spare
            except BaseException:
                await asyncio.shield(spare.end())
                raise
            await asyncio.shield(spare.end())
        return None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Box]:
        """A box of the sandbox; few start at once."""
        async with AsyncExitStack() as stack:
            async with self._starting:
                box = await stack.enter_async_context(self._sandbox.open())
            yield box


class _Spare:
    """A box that a task of its own opens and closes: who opens a spare is not who uses it."""

    def __init__(self, spares: _Spares) -> None:
        self._spares = spares
        self._taken, self._over = asyncio.Event(), asyncio.Event()
        self._box: Box | None = None
        self._holder = asyncio.create_task(self._hold(), name="sandbox/spare")

    @property
    def box(self) -> Box:
        """The box, which is open."""
        assert self._box is not None, "a spare that is ready has a box"
        return self._box

    async def _hold(self) -> None:
        try:
            async with self._spares.opened() as self._box:
                self._spares.ready.append(self)
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._taken.wait()
                if self._taken.is_set():
                    await self._over.wait()
                else:
                    self._spares.ready.remove(self)
        except EpisodeError:
            if self._box is not None:
                raise
            # It could not be opened. Whoever needs the next box meets the fault.
        finally:
            self._spares.waiting.discard(self)

    def take(self) -> None:
        """From now on, it is somebody's."""
        self._taken.set()
        self._spares.waiting.discard(self)

    async def end(self) -> None:
        """Ends the box. Raises EpisodeError if something of it is left."""
        self._over.set()
        await asyncio.wait([self._holder])
        if not self._holder.cancelled():
            self._holder.result()
