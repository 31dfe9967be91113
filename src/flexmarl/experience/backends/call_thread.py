"""SQLite connections in threads of their own, so that the event loop never waits for a disk.

consumes    calls: functions of a connection, at most `MAX_WAITING` of them; a caller beyond that waits for room
waits for   the disk: one sync per transaction, and other processes' write locks
produces    each call's result or its own error, once the transaction that holds it is durable
unblocked by the next call; all that came while a transaction ran share the next one

Calls of one tick of the loop are handed over together: a thread that wakes for each of them fights for the interpreter.
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
from flexmarl.experience.backends.tables import transaction

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

MAX_WAITING = 1024
"""Calls that may wait for the thread; more would only hold memory."""
MAX_TOGETHER = 256
"""Calls in one transaction: the sync is shared by enough, and no other process waits long for the lock."""


class Joinable(ABC):
    """Work without a result, several of which are faster done as one."""

    @abstractmethod
    def __call__(self, db: sqlite3.Connection) -> None:
        """Does it alone."""

    @abstractmethod
    def all_of(self, works: "Sequence[Joinable]") -> Work:
        """Does all of these, itself among them, to the same effect as one after the other."""


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way through the thread."""

    work: Work
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class CallThread:
    """One connection, its thread, and the calls that wait for it. `together` runs some of them as one transaction."""

    def __init__(
        self, name: str, db: sqlite3.Connection, together: Callable[[sqlite3.Connection, Sequence[Call]], None]
    ) -> None:
        self._db = db
        self._together = together
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._gathered: list[Call] = []
        """What came in this tick of the loop."""
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._last: Call | None = None
        """The call that closes; none comes after it."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many calls have come and are not begun; at most `MAX_WAITING`."""
        return self._calls.qsize() + len(self._gathered)

    async def call(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of `work`, once it is durable. If the caller is cancelled, the work may have been done or not."""
        return await (await self.begin(work))

    async def begin(self, work: Callable[[sqlite3.Connection], Result]) -> "asyncio.Future[Result]":
        """The future of the result of `work`; returns when there is room for it."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            raise StoreError("the experience store is closed; open a new one")
        return self._queue(Call(work, asyncio.get_running_loop().create_future()))

    async def close(self) -> None:
        """Closes the connection, after all calls that came before; calling it twice is no error."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            return
        self._last = Call(sqlite3.Connection.close, asyncio.get_running_loop().create_future())
        await self._queue(self._last)

    def _queue(self, call: Call) -> asyncio.Future[Any]:
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

    def _answer(self, calls: Sequence[Call]) -> None:
        for loop in {call.future.get_loop() for call in calls}:
            mine = [call for call in calls if call.future.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(self._deliver, mine)
            except RuntimeError:  # the loop has ended, and with it whoever waited
                continue

    def _deliver(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._room.release()
            if call.future.done():  # its caller was cancelled
                continue
            if call.error is None:
                call.future.set_result(call.result)
            else:
                call.future.set_exception(call.error)


def commit_together(db: sqlite3.Connection, calls: Sequence[Call]) -> None:
    """Runs the calls in one transaction: one that fails changes nothing and fails alone, the others share one sync."""
    if not calls:
        return
    try:
        with transaction(db):
            for together in _joined(calls):
                if len(together) == 1 or not _attempt_all(db, together):
                    for call in together:
                        call.result, call.error = _attempt(db, call.work)
    except Exception as error:  # the transaction did not become durable, so none of them did
        for call in calls:
            call.error = call.error or error


def read_together(db: sqlite3.Connection, calls: Sequence[Call]) -> None:
    """Runs the calls on one snapshot, which holds all that was acknowledged before they came."""
    try:
        with transaction(db, "BEGIN"):
            for call in calls:
                try:
                    call.result = call.work(db)
                except Exception as error:
                    call.error = error
    except Exception as error:
        for call in calls:
            call.error = call.error or error


def run_alone(db: sqlite3.Connection, calls: Sequence[Call]) -> None:
    """Runs the calls one after the other, in no transaction."""
    for call in calls:
        try:
            call.result = call.work(db)
        except Exception as error:
            call.error = error


def _joined(calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """The calls in order; those that follow each other and can be joined come together."""
    for joinable, together in groupby(calls, lambda call: isinstance(call.work, Joinable)):
        if joinable:
            yield list(together)
        else:
            yield from ([call] for call in together)


def _attempt_all(db: sqlite3.Connection, calls: Sequence[Call]) -> bool:
    """Whether all of these could be done as one; if not, nothing was done."""
    works = [call.work for call in calls if isinstance(call.work, Joinable)]
    return _attempt(db, works[0].all_of(works))[1] is None


def _attempt(db: sqlite3.Connection, work: Work) -> tuple[Any, Exception | None]:
    """The result of the work, or its error; then it has changed nothing."""
    result, failed = None, None
    db.execute("SAVEPOINT one_call")
    try:
        result = work(db)
    except Exception as error:
        failed = error
        if not db.in_transaction:  # SQLite gave up the whole transaction: a full disk, a failing one
            raise
        db.execute("ROLLBACK TO one_call")
    db.execute("RELEASE one_call")
    return result, failed
