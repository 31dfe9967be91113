"""Runs the streams of one proxy: opens them in the resident and passes on their items, in shared crossings.

    open, close, send ──► outgoing ──► exchange ──► the resident, which keeps a few exchanges until it has items
    each reader       ◄── its queue ◄── reply   ◄──

A reply to one request is so the only crossing that the answer to it takes.

consumes      streams to open and to close, and messages; those that arrive in one turn of the event loop share an
              exchange, and so do those that arrive while `MOST_UNDER_WAY` exchanges are
waits for     the resident
produces      the items of each stream, in the batches in which the resident has them
unblocked by  a stream; there are exchanges only while there is something to send or to wait for
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from flexmarl.cluster.host import MOST_WAITING, Collected, OneWayCall, OpenStream, StreamExchange, StreamItems
from flexmarl.errors import WorkerError

MOST_UNDER_WAY = MOST_WAITING + 2
"""Exchanges at once: those that wait for items, one on its way there, and one on its way back."""


class Crosses(Protocol):
    """The part of `Channel` that streams use: it carries one call to the resident, and returns its result."""

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `Channel.cross`."""
        ...


class Streams:
    """The open streams of one resident, seen from the controller."""

    def __init__(self, channel: Crosses, tasks: asyncio.TaskGroup, *, name: str) -> None:
        """Exchanges run in `tasks`, under the name `exchange-{name}`."""
        self._channel, self._tasks, self._name = channel, tasks, name
        self._numbers, self._exchanges = itertools.count(), itertools.count()
        self._queues: dict[int, asyncio.Queue[StreamItems]] = {}
        """By number: a queue of each stream that has a reader."""
        self._opens: dict[int, OpenStream] = {}
        self._opens_alone: dict[int, OpenStream] = {}
        """Streams whose common exchange was refused: the arguments of one of them cannot be copied."""
        self._closes: list[int] = []
        self._sends: list[OneWayCall] = []
        self._opened: set[int] = set()
        """Streams that are open in the resident, or about to be."""
        self._under_way: dict[asyncio.Task[None], None] = {}
        """The tasks of exchanges, the oldest first."""
        self._last_full, self._last_taken = -1, -1
        """Numbers of the last exchange that carried something, and of the last that is known to be taken in."""
        self._early: dict[int, Collected] = {}
        """By number: replies that came before one of an earlier number."""
        self._next_reply = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost: WorkerError | None = None

    async def open(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yields the items of a new stream. Raises its iterator's error, or WorkerError if the resident is lost."""
        self._require_live()
        number = next(self._numbers)
        queue = self._queues[number] = asyncio.Queue[StreamItems]()
        self._opens[number] = OpenStream(number, method, args, kwargs)
        self._start()
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

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        """Sends a call that nobody waits for. Raises WorkerError if the resident is known to be lost."""
        self._require_live()
        self._sends.append(OneWayCall(method, args))
        self._start()

    async def sent(self) -> None:
        """Waits until all that was opened, closed or sent before has been taken in by the resident."""
        while self._outgoing() and self._under_way:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        if self._last_taken < self._last_full and self._lost is None:
            await self._cross(StreamExchange(next(self._exchanges), waits=False))

    async def ended(self) -> None:
        """Waits until no stream is open in the resident."""
        await self._idle.wait()

    def lose(self, error: WorkerError) -> None:
        """Ends all streams: every reader that waits, and every later one, raises the error."""
        self._lost = self._lost or error
        for number, queue in self._queues.items():
            queue.put_nowait(StreamItems(number, ended=True, error=self._lost))
        for kept in (self._queues, self._opens, self._opens_alone, self._closes, self._sends, self._opened):
            kept.clear()
        for task in [*self._under_way]:
            if task is not asyncio.current_task():
                task.cancel()

    def _require_live(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _drop(self, number: int) -> None:
        """Drops a stream that nobody reads any more, and closes it in the resident."""
        for kept in (self._queues, self._opens, self._opens_alone):
            kept.pop(number, None)
        if number in self._opened:
            self._closes.append(number)
            self._start()

    def _outgoing(self) -> bool:
        return bool(self._opens or self._opens_alone or self._closes or self._sends)

    def _start(self) -> None:
        """Has what is outgoing exchanged, in the next turn of the event loop."""
        if self._outgoing() and len(self._under_way) < MOST_UNDER_WAY:
            self._idle.clear()
            task = self._tasks.create_task(self._exchange(), name=f"exchange-{self._name}")
            self._under_way[task] = None
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None] | None) -> None:
        """Also of a task that was cancelled before it began."""
        if task is not None:
            self._under_way.pop(task, None)
        if not self._under_way:
            self._idle.set()

    async def _exchange(self) -> None:
        """Exchanges until nothing is outgoing, and another exchange waits for items, or no stream is open."""
        try:
            while self._outgoing() or (self._opened and len(self._under_way) == 1):
                collected = await self._cross(self._next_exchange())
                if collected.number is not None:
                    self._early[collected.number] = collected
                while next_one := self._early.pop(self._next_reply, None):
                    self._next_reply += 1
                    self._pass_on(next_one)
        except BaseException as error:  # Any error of a crossing is the loss of the resident.
            self.lose(error if isinstance(error, WorkerError) else WorkerError(f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):  # A cancellation means that its cluster ends.
                raise
        finally:
            self._done(asyncio.current_task())

    def _next_exchange(self) -> StreamExchange:
        opens, self._opens = [*self._opens.values()], {}
        if not opens and self._opens_alone:
            opens = [self._opens_alone.pop(next(iter(self._opens_alone)))]
        exchange = StreamExchange(next(self._exchanges), opens, self._closes, self._sends)
        self._closes, self._sends = [], []
        self._opened.update(stream.number for stream in opens)
        self._opened.difference_update(exchange.closes)
        return exchange

    async def _cross(self, exchange: StreamExchange) -> Collected:
        """Crosses once; twice if the arguments of a stream cannot be copied, and then that stream alone fails."""
        if exchange.opens or exchange.closes or exchange.sends:
            self._last_full = max(self._last_full, exchange.number)
        try:
            collected = await self._channel.cross("exchange", exchange)
        except WorkerError:
            raise
        except Exception as error:  # It was refused as a whole.
            if not exchange.opens:
                raise
            self._opened.difference_update(stream.number for stream in exchange.opens)
            if len(exchange.opens) > 1:
                self._opens_alone |= {one.number: one for one in exchange.opens if one.number in self._queues}
            else:
                self._fail(exchange.opens[0].number, error)
            return await self._cross(StreamExchange(exchange.number, (), exchange.closes, exchange.sends, waits=False))
        self._last_taken = max(self._last_taken, exchange.number)
        return collected

    def _fail(self, number: int, error: Exception) -> None:
        if queue := self._queues.get(number):
            queue.put_nowait(StreamItems(number, ended=True, error=error))

    def _pass_on(self, collected: Collected) -> None:
        for stream in collected.streams:
            if stream.ended:
                self._opened.discard(stream.number)
            if queue := self._queues.get(stream.number):
                queue.put_nowait(stream)
