"""Runs the streams of one proxy: opens them in the resident and passes on their items, in shared crossings.

    open ──► outbox ──► open ──►.                .──► queue of each stream ──► its reader
    close ─► outbox ──► shut ──►+─ the resident ─+
                                '─── collect ────'  again and again, while a stream is open

consumes      streams to open and to close; those that arrive during a crossing share the next one
waits for     the resident
produces      the items of each stream, in the batches in which the resident has them
unblocked by  a stream; the two tasks exist only while there is something to send or to wait for
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from flexmarl.cluster.host import OpenStream, StreamItems
from flexmarl.errors import WorkerError


class Crosses(Protocol):
    """The part of `Channel` that streams use: it carries one call to the resident, and returns its result."""

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `Channel.cross`."""
        ...


class Streams:
    """The open streams of one resident, seen from the controller."""

    def __init__(self, channel: Crosses, tasks: asyncio.TaskGroup, *, name: str) -> None:
        """The two tasks run in `tasks`, under the names `send-{name}` and `collect-{name}`."""
        self._channel, self._tasks, self._name = channel, tasks, name
        self._numbers = itertools.count()
        self._queues: dict[int, asyncio.Queue[StreamItems]] = {}
        """By number: a queue of each stream that has a reader."""
        self._outbox: dict[int, OpenStream] = {}
        self._to_close: list[int] = []
        self._opened: set[int] = set()
        """Streams that are open in the resident, or about to be."""
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._lost: WorkerError | None = None

    async def open(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yields the items of a new stream. Raises its iterator's error, or WorkerError if the resident is lost."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        queue = self._queues[number] = asyncio.Queue[StreamItems]()
        self._outbox[number] = OpenStream(number, method, args, kwargs)
        self._start_sender()
        try:
            while True:
                collected = await queue.get()
                for item in collected.items:
                    yield item
                if collected.error is not None:
                    raise collected.error
                if collected.ended:
                    return
        finally:
            self._drop(number)

    async def sent(self) -> None:
        """Waits until every earlier opening and closing of a stream has been done in the resident."""
        while self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender])

    async def ended(self) -> None:
        """Waits until no stream is open in the resident."""
        while self._collector is not None and not self._collector.done():
            await asyncio.wait([self._collector])

    def lose(self, error: WorkerError) -> None:
        """Ends all streams: every reader that waits, and every later one, raises the error."""
        self._lost = self._lost or error
        for number, queue in self._queues.items():
            queue.put_nowait(StreamItems(number, ended=True, error=self._lost))
        self._queues.clear()
        self._outbox.clear()
        self._to_close.clear()
        self._opened.clear()
        for task in (self._sender, self._collector):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def _drop(self, number: int) -> None:
        """Drops a stream that nobody reads any more, and closes it in the resident."""
        self._queues.pop(number, None)
        self._outbox.pop(number, None)
        if number in self._opened:
            self._to_close.append(number)
            self._start_sender()

    def _start_sender(self) -> None:
        if (self._outbox or self._to_close) and (self._sender is None or self._sender.done()):
            self._sender = self._tasks.create_task(self._send(), name=f"send-{self._name}")

    async def _send(self) -> None:
        """Opens and shuts streams, one crossing after the other, so that no stream is shut before it is open."""
        try:
            while self._outbox or self._to_close:
                outbox, self._outbox = self._outbox, {}
                if outbox:
                    self._opened.update(outbox)
                    await self._open(list(outbox.values()))
                    if self._collector is None or self._collector.done():
                        self._collector = self._tasks.create_task(self._collect(), name=f"collect-{self._name}")
                to_close, self._to_close = self._to_close, []
                if to_close:
                    await self._channel.cross("close_streams", *to_close)
                    self._opened.difference_update(to_close)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    async def _open(self, streams: Sequence[OpenStream]) -> None:
        """Opens streams in one crossing. If arguments cannot be copied, only the streams that have them fail."""
        try:
            await self._channel.cross("open_streams", *streams)
        except WorkerError:
            raise
        except Exception as error:  # The crossing was refused as a whole, so none of the streams is open there.
            if len(streams) > 1:
                for stream in streams:
                    await self._open([stream])
                return
            (stream,) = streams
            self._opened.discard(stream.number)
            if queue := self._queues.get(stream.number):
                queue.put_nowait(StreamItems(stream.number, ended=True, error=error))

    async def _collect(self) -> None:
        """Passes on items until no stream is open."""
        try:
            while self._opened:
                found: list[StreamItems] = await self._channel.cross("collect_streams")
                if not found:  # The resident has no open stream, or not yet.
                    await self.sent()
                for collected in found:
                    if collected.ended:
                        self._opened.discard(collected.number)
                    if queue := self._queues.get(collected.number):
                        queue.put_nowait(collected)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        """Treats any error of a crossing as the loss of the resident. A cancellation means that its cluster ends."""
        self.lose(error if isinstance(error, WorkerError) else WorkerError(f"{type(error).__name__}: {error}"))
