"""SQLite connections in threads of their own, so that the event loop never waits for a disk.

consumes    calls: functions of a connection, at most `MAX_WAITING` of them; a caller beyond that waits for room
waits for   the disk: one sync per transaction, and other processes' write locks
produces    each call's result or its own error, once the transaction that holds it is durable
unblocked by the next call; all that came while a transaction ran share the next one
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flexmarl.errors import StoreError
from flexmarl.experience.backends.tables import transaction

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Any]

MAX_WAITING = 1024
"""Calls that may wait for the thread; more would only hold memory."""
MAX_TOGETHER = 256
"""Calls in one transaction: the sync is shared by enough, and no other process waits long for the lock."""


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
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._last: Call | None = None
        """The call that closes; none comes after it."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many calls have come and are not begun; at most `MAX_WAITING`."""
        return self._calls.qsize()

    async def call(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of `work`, once it is durable. If the caller is cancelled, the work may have been done or not."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            raise StoreError("the experience store is closed; open a new one")
        return await self._queue(Call(work, asyncio.get_running_loop().create_future()))

    async def close(self) -> None:
        """Closes the connection, after all calls that came before; calling it twice is no error."""
        await self._room.acquire()
        if self._last is not None:
            self._room.release()
            return
        self._last = Call(sqlite3.Connection.close, asyncio.get_running_loop().create_future())
        await self._queue(self._last)

    def _queue(self, call: Call) -> asyncio.Future[Any]:
        self._calls.put(call)
        return call.future

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
            for call in calls:
                _attempt(db, call)
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


def _attempt(db: sqlite3.Connection, call: Call) -> None:
    db.execute("SAVEPOINT one_call")
    try:
        call.result = call.work(db)
    except Exception as error:
        call.error = error
        if not db.in_transaction:  # SQLite gave up the whole transaction: a full disk, a failing one
            raise
        db.execute("ROLLBACK TO one_call")
    db.execute("RELEASE one_call")
