"""SQLite connections on threads of their own, so that the event loop never waits for a disk.

consumes    calls: functions of a connection; at most `MAX_WAITING` of them wait, and a further caller waits for room
waits for   the disk (one sync per transaction) and the write locks of other processes
produces    each call's result or its own error, once the transaction that holds it is durable
unblocked by the next call; all calls that arrive while a transaction runs share the next transaction

The calls of one tick of the event loop go to the thread together. If it woke for each of them, the two threads would
compete for the interpreter.
"""

import asyncio
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from flexmarl.errors import StoreError
from flexmarl.experience.transactions import transaction

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

MAX_WAITING = 1024
"""Calls that may wait for the thread. More would only take memory."""
MAX_TOGETHER = 256
"""Calls in one transaction: enough to share the sync, few enough that no other process waits long for the lock."""


class Joinable(ABC):
    """Work without a result. Several of these are done faster as one."""

    @abstractmethod
    def __call__(self, db: sqlite3.Connection) -> None:
        """Does this work alone."""

    @abstractmethod
    def all_of(self, works: "Sequence[Joinable]") -> Work:
        """Returns one work that has the effect of all `works` (this one included), one after the other."""


@dataclass(slots=True, eq=False)
class StoreCall:
    """One call on its way through the thread."""

    work: Work
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class CallThread:
    """One connection, its thread and the calls that wait for it. `together` runs a list of calls on the connection."""

    def __init__(
        self, name: str, db: sqlite3.Connection, together: Callable[[sqlite3.Connection, Sequence[StoreCall]], None]
    ) -> None:
        self._db = db
        self._together = together
        self._calls: queue.SimpleQueue[StoreCall] = queue.SimpleQueue()
        self._gathered: list[StoreCall] = []
        """Calls that arrived in this tick of the event loop."""
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._last: StoreCall | None = None
        """The call that closes the connection; no call follows it."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of calls that arrived and have not started; at most `MAX_WAITING`."""
        return self._calls.qsize() + len(self._gathered)

    async def call(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Returns the result of `work` once it is durable. If the caller is cancelled, the work may still be done."""
        return await (await self.begin(work))

    async def begin(self, work: Callable[[sqlite3.Connection], Result]) -> "asyncio.Future[Result]":
        """Waits for room, queues `work` and returns the future of its result. Raises StoreError after `close`."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            raise StoreError("the experience store is closed; open a new one")
        return self._queue(StoreCall(work, asyncio.get_running_loop().create_future()))

    async def close(self) -> None:
        """Closes the connection after all earlier calls. Calling it twice is allowed."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            return
        self._last = StoreCall(sqlite3.Connection.close, asyncio.get_running_loop().create_future())
        await self._queue(self._last)

    def _queue(self, call: StoreCall) -> asyncio.Future[Any]:
        if not self._gathered:
            call.future.get_loop().call_soon(self._hand_over)
        self._gathered.append(call)
        return call.future

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        for call in gathered:
            self._calls.put(call)

    def _serve(self) -> None:
        ended = False
        while not ended:
            calls = [self._calls.get()]
            while len(calls) < MAX_TOGETHER and not self._calls.empty():
                calls.append(self._calls.get())
            ended = calls[-1] is self._last
            self._together(self._db, calls[:-1] if ended else calls)
            if ended:
                self._db.close()
            self._answer(calls)

    def _answer(self, calls: Sequence[StoreCall]) -> None:
        for loop in {call.future.get_loop() for call in calls}:
            mine = [call for call in calls if call.future.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(self._deliver, mine)
            except RuntimeError:  # the event loop has ended, so nobody waits for these results
                continue

    def _deliver(self, calls: Sequence[StoreCall]) -> None:
        for call in calls:
            self._room.release()
            if call.future.done():  # its caller was cancelled
                continue
            if call.error is None:
                call.future.set_result(call.result)
            else:
                call.future.set_exception(call.error)


def commit_together(db: sqlite3.Connection, calls: Sequence[StoreCall]) -> None:
    """Runs the calls in one transaction with one sync. A call that fails changes nothing, and the others still run."""
    if not calls:
        return
    try:
        with transaction(db):
            for together in _joined(calls):
                if len(together) == 1 or not _attempt_all(db, together):
                    for call in together:
                        call.result, call.error = _attempt(db, call.work)
    except Exception as error:  # the transaction is not durable, so every call in it failed
        for call in calls:
            call.error = call.error or error


def read_together(db: sqlite3.Connection, calls: Sequence[StoreCall]) -> None:
    """Runs the calls on one snapshot, which includes every write that was acknowledged before they arrived."""
    try:
        with transaction(db, "BEGIN"):
            run_alone(db, calls)
    except Exception as error:
        for call in calls:
            call.error = call.error or error


def run_alone(db: sqlite3.Connection, calls: Sequence[StoreCall]) -> None:
    """Runs the calls one after the other, in no transaction of its own."""
    for call in calls:
        try:
            call.result = call.work(db)
        except Exception as error:
            call.error = error


def _joined(calls: Sequence[StoreCall]) -> Iterator[Sequence[StoreCall]]:
    """Yields the calls in order; consecutive calls whose work is Joinable come as one list."""
    for joinable, together in groupby(calls, lambda call: isinstance(call.work, Joinable)):
        if joinable:
            yield list(together)
        else:
            yield from ([call] for call in together)


def _attempt_all(db: sqlite3.Connection, calls: Sequence[StoreCall]) -> bool:
    """Tries to do all the calls as one work. Returns False if that fails; then nothing has changed."""
    works = [call.work for call in calls if isinstance(call.work, Joinable)]
    return _attempt(db, works[0].all_of(works))[1] is None


def _attempt(db: sqlite3.Connection, work: Work) -> tuple[Any, Exception | None]:
    """Returns the result of the work, or its error after undoing its changes."""
    result, failed = None, None
    db.execute("SAVEPOINT one_call")
    try:
        result = work(db)
    except Exception as error:
        failed = error
        if not db.in_transaction:  # SQLite rolled back the whole transaction: the disk is full or fails
            raise
        db.execute("ROLLBACK TO one_call")
    db.execute("RELEASE one_call")
    return result, failed
