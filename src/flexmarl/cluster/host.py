"""Host of one resident on an event loop of any process: it makes the hosted object and answers calls, as bytes.

controller                              process of the resident
proxy ── call ────────────────────────► Host ─► one method of what lives there
proxy ── exchange: open, close, send ─► Host ─► a reader for each stream ─► items gather
      ◄─ items, as many as there are ──        and cross together, as the reply to an exchange that waits
"""

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexmarl.errors import WorkerError, described
from flexmarl.imports import collected_later

NICENESS = 5
"""Gives a third of an engine's share of a core. Linux's idle class hides more of training behind rollout, but starves
training where the machine has other work."""


def lower_priority() -> None:
    """Lowers the scheduling priority of this process and of the threads that it will start.

    A step waits for its slowest episode, so engines run first and training fills the gaps.
    """
    os.nice(NICENESS)


MOST_WAITING = 4
"""Exchanges that wait for items in a resident. One more ends the oldest, without items."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A call of a method that returns an async iterator."""

    number: int
    """Unique among the streams of one proxy."""
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OneWayCall:
    """A call of a method whose caller waits for nothing."""

    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class StreamItems:
    """Items of one stream since the last collection."""

    number: int
    items: list[Any] = field(default_factory=list)
    """In the order of the iterator."""
    ended: bool = False
    error: Exception | None = None
    """The exception that ended the iterator, if one did."""


@dataclass(frozen=True, slots=True)
class StreamExchange:
    """All that a proxy has for the streams of its resident, in one crossing. The reply to it is a `Collected`."""

    number: int
    """Exchanges are taken in by number: crossings may overtake each other."""
    opens: Sequence[OpenStream] = ()
    closes: Sequence[int] = ()
    sends: Sequence[OneWayCall] = ()
    waits: bool = True
    """Whether its reply may come later, with items."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Items of streams, as the reply to an exchange."""

    streams: Sequence[StreamItems] = ()
    number: int | None = None
    """Replies that have items are passed on by number; None for one without."""


class Host:
    """Makes one object, calls its methods and reads its streams, on the event loop of its process.

    >>> host = Host()
    >>> answer(asyncio.run(host.make_hosted(packed(list, "abc"))))
    >>> answer(asyncio.run(host.call_method("index", packed("b"))))
    1
    """

    def __init__(self, *, path: Sequence[str] = (), threads: int | None = None) -> None:
        """Sets where modules are found and how many threads torch gets; must come before anything imports torch.

        The threads of an operation sleep while they wait for each other. By default they spin, on cores that the other
        residents of the machine need (benchmarks/shared_cores.py).
        """
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")  # The count may be a command's.
        sys.path.extend(folder for folder in path if folder not in sys.path)
        if threads is not None:
            os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
        self.hosted: Any = None
        """The object that lives here."""
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._gathered: dict[int, StreamItems] = {}
        """By number: the streams that have items, or have ended, and of which no reply has told yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """One for each exchange that waits for items, the oldest first."""
        self._turns: dict[int, asyncio.Future[None]] = {}
        """By number: exchanges that came before one of an earlier number, and wait until it has been taken in."""
        self._next_exchange, self._next_reply = 0, 0

    async def process_id(self) -> int:
        """Returns the id of this process."""
        return os.getpid()

    async def hold_on(self) -> None:
        """Never returns. The call fails when the process dies, so a caller that waits for it notices the death."""
        await asyncio.Event().wait()

    async def make_hosted(self, make: bytes) -> bytes:
        """Makes the hosted object: calls the first of the packed arguments with the others."""
        return await replied(lambda: self._make(make))

    async def call_method(self, method: str, arguments: bytes) -> bytes:
        """Answers a call of a method, async or not."""
        return await replied(lambda: self._call(method, *pickle.loads(arguments)))

    async def exchange(self, exchange: bytes) -> bytes:
        """Takes in a `StreamExchange`; waits until a stream has items or none is open; returns the items of all.

        An exchange that cannot be unpickled has done nothing, and its number is still awaited.
        """
        try:
            ((took,), _) = pickle.loads(exchange)
            await self._take_in(took)
            collected = await self._collect() if took.waits else Collected()
        except Exception as error:
            return failed(error)
        try:
            return pickle.dumps((collected, None, ""), protocol=5)
        except Exception:  # An item cannot be copied: its stream fails, and the others go on.
            streams = [self._copyable(each) for each in collected.streams]
            return pickle.dumps((Collected(streams, collected.number), None, ""), protocol=5)

    def _make(self, make: bytes) -> None:
        with collected_later():  # Unpickling imports torch.
            function, *args = pickle.loads(make)[0]
        self.hosted = function(*args)

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.hosted is None:  # Who reaches it by its name may come before its maker.
            raise WorkerError("it is being started")
        return getattr(self.hosted, method)(*args, **kwargs)

    async def _take_in(self, exchange: StreamExchange) -> None:
        if exchange.number != self._next_exchange:
            turn = self._turns[exchange.number] = asyncio.get_running_loop().create_future()
            await turn
        try:
            for stream in exchange.opens:
                reader = asyncio.create_task(self._read(stream), name=f"read-{stream.method}-{stream.number}")
                self._readers[stream.number] = reader
                reader.add_done_callback(lambda _, number=stream.number: self._ended(number))
            self._close(*exchange.closes)
            for sent in exchange.sends:
                await self._call(sent.method, sent.args, {})
        except Exception as error:
            raise WorkerError(f"what was sent to it could not be taken: {described(error)}") from error
        finally:
            self._next_exchange += 1
            if (turn := self._turns.pop(self._next_exchange, None)) and not turn.done():
                turn.set_result(None)

    def _close(self, *numbers: int) -> None:
        for number in numbers:
            self._gathered.pop(number, None)
            if reader := self._readers.get(number):
                reader.cancel()

    def _ended(self, number: int) -> None:
        """Forgets a reader. Without any, no exchange has anything to wait for."""
        del self._readers[number]
        while self._waiting and not self._readers:
            self._wake_oldest()

    async def _collect(self) -> Collected:
        if not self._gathered and self._readers:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            if len(self._waiting) > MOST_WAITING:
                self._wake_oldest()
            await waiting
            await asyncio.sleep(0)  # Items and ends that come in this turn of the event loop cross together.
        if not self._gathered:
            return Collected()
        gathered, self._gathered = self._gathered, {}
        self._next_reply += 1
        return Collected(list(gathered.values()), self._next_reply - 1)

    def _wake_oldest(self) -> None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(None)
                return

    def _copyable(self, collected: StreamItems) -> StreamItems:
        """Returns the news, or, if its items cannot be pickled, the error that ends its stream."""
        try:
            pickle.dumps(collected, protocol=5)
        except Exception as error:
            self._close(collected.number)
            return StreamItems(collected.number, ended=True, error=portable(error))
        return collected

    async def _read(self, stream: OpenStream) -> None:
        error = None
        try:
            async for item in self._call(stream.method, stream.args, stream.kwargs):
                self._gathered_from(stream.number).items.append(item)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            error = cancelled_itself(stream.method)
        except Exception as raised:
            error = portable(raised)
        except BaseException as raised:
            error = WorkerError(f"'{stream.method}' was ended by {described(raised)}")
            raise
        finally:
            if not is_being_cancelled():
                collected = self._gathered_from(stream.number)
                collected.ended, collected.error = True, error

    def _gathered_from(self, number: int) -> StreamItems:
        """Returns the news of a stream, to which the caller is about to add."""
        if not self._gathered and self._waiting:
            self._wake_oldest()
        return self._gathered.setdefault(number, StreamItems(number))


def packed(*args: Any, **kwargs: Any) -> bytes:
    """Arguments as `Host` reads them. Plain pickle, in one piece: arrays arrive writable, unlike in Ray's messages."""
    return pickle.dumps((args, kwargs), protocol=5)


def answer(reply: bytes, *, name: str = "") -> Any:
    """Returns the result in a reply, or raises its error, with the traceback of its process as a note."""
    result, error, origin = pickle.loads(reply)
    if error is None:
        return result
    error.add_note(f"in {name or 'a resident'}:\n{origin}")
    raise error


async def replied(work: Callable[[], Any]) -> bytes:
    """Runs the work, async or not, and packs its result or error as `answer` reads it."""
    try:
        result = work()
        if inspect.isawaitable(result):
            result = await result
        return pickle.dumps((result, None, ""), protocol=5)
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        return failed(cancelled_itself("a call"))
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> bytes:
    """The error of the work that failed just now, as `answer` reads it."""
    return pickle.dumps((None, portable(error), traceback.format_exc()), protocol=5)


def is_being_cancelled() -> bool:
    """True if the current task was cancelled; False if a CancelledError only came out of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cancelled_itself(what: str) -> RuntimeError:
    """The error for work that ended with CancelledError although nobody cancelled it.

    As a CancelledError it would end its caller's task in silence, as if the caller had been cancelled.
    """
    return RuntimeError(f"{what} awaited something that was cancelled")


def portable(error: Exception) -> Exception:
    """Returns the error itself if it survives pickling, else the most similar error that does."""
    for candidate in (error, ErrorWithoutInit(error)):
        try:
            back = pickle.loads(pickle.dumps(candidate))
        except Exception:  # whatever its own __init__ raises, the next form is tried
            continue
        if type(back) is type(error):
            return candidate
    text = f"{type(error).__name__}: {error}"
    for kind in type(error).__mro__[1:]:  # Who catches EngineError must also catch an engine's own class of it.
        if kind is Exception:
            break
        try:
            candidate = kind(text)
            if type(pickle.loads(pickle.dumps(candidate))) is kind:
                return candidate
        except Exception:
            continue
    return RuntimeError(text)


class ErrorWithoutInit(Exception):
    """Pickles as another error, which is rebuilt without its `__init__`: that one may take other arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self._error), self._error.args, self._error.__dict__)


def rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Makes an error of this class with these arguments and attributes, without calling its `__init__`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
