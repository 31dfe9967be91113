import asyncio
import sqlite3
import threading

import pytest

from flexmarl.errors import StoreError
from flexmarl.experience.backends.call_thread import MAX_WAITING, CallThread, commit_together, read_together
from flexmarl.experience.transactions import connect


class Held:
    """A writer thread whose first call waits until it is let go, so that others come meanwhile."""

    def __init__(self) -> None:
        self.commits: list[str] = []
        db = connect(":memory:")
        db.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY)")
        db.set_trace_callback(lambda sql: self.commits.append(sql) if sql == "COMMIT" else None)
        self.thread = CallThread("test", db, commit_together)
        self.let_go = threading.Event()

    async def first(self) -> asyncio.Task[object]:
        started = threading.Event()

        def hold(db: sqlite3.Connection) -> None:
            started.set()
            self.let_go.wait()

        task = asyncio.create_task(self.thread.call(hold))
        while not started.is_set():  # noqa: ASYNC110  (set by another thread, at once)
            await asyncio.sleep(0)
        return task

    def add(self, n: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.thread.call(lambda db: insert(db, n)))

    async def numbers(self) -> list[int]:
        rows = await self.thread.call(lambda db: db.execute("SELECT n FROM numbers ORDER BY n").fetchall())
        return [n for (n,) in rows]


def insert(db: sqlite3.Connection, n: int) -> None:
    db.execute("INSERT INTO numbers VALUES (?)", (n,))
    if n < 0:
        raise StoreError(f"{n} is negative")


def test_calls_that_came_while_one_ran_share_a_commit():
    async def life() -> None:
        held = Held()
        first = await held.first()
        adding = [held.add(n) for n in range(50)]
        await asyncio.sleep(0)
        held.let_go.set()
        await asyncio.gather(first, *adding)
        assert len(held.commits) == 2
        assert await held.numbers() == [*range(50)]
        await held.thread.close()

    asyncio.run(life())


def test_a_call_that_fails_changes_nothing_and_fails_alone():
    async def life() -> None:
        held = Held()
        first = await held.first()
        adding = [held.add(n) for n in (1, -2, 3, 1, 4)]
        await asyncio.sleep(0)
        held.let_go.set()
        results = await asyncio.gather(first, *adding, return_exceptions=True)
        assert [type(result) for result in results[1:]] == [
            type(None),
            StoreError,
            type(None),
            sqlite3.IntegrityError,
            type(None),
        ]
        assert len(held.commits) == 2
        assert await held.numbers() == [1, 3, 4]
        await held.thread.close()

    asyncio.run(life())


def test_a_transaction_that_ends_by_itself_takes_all_its_calls_with_it():
    async def life() -> None:
        held = Held()
        first = await held.first()

        def give_up(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR ROLLBACK INTO numbers VALUES (1)")  # as SQLite does on a full disk

        adding = [held.add(1), asyncio.create_task(held.thread.call(give_up)), held.add(2)]
        await asyncio.sleep(0)
        held.let_go.set()
        results = await asyncio.gather(first, *adding, return_exceptions=True)
        assert [type(result) for result in results[1:]] == [sqlite3.IntegrityError] * 3
        assert await held.numbers() == []
        await held.add(5)
        assert await held.numbers() == [5]
        await held.thread.close()

    asyncio.run(life())


def test_a_cancelled_caller_leaves_the_others_as_they_are():
    async def life() -> None:
        held = Held()
        first = await held.first()
        cancelled, kept = held.add(1), held.add(2)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        held.let_go.set()
        await asyncio.gather(first, kept)
        assert cancelled.cancelled()
        assert set(await held.numbers()) - {1} == {2}
        await held.thread.close()

    asyncio.run(life())


def test_a_caller_beyond_the_bound_waits_for_room_and_loses_nothing():
    async def life() -> None:
        held = Held()
        first = await held.first()
        adding = [held.add(n) for n in range(MAX_WAITING + 10)]
        await asyncio.sleep(0)
        assert held.thread.waiting == MAX_WAITING - 1, "all room is taken, by the call that runs and those"
        held.let_go.set()
        await asyncio.gather(first, *adding)
        assert await held.numbers() == [*range(MAX_WAITING + 10)]
        await held.thread.close()

    asyncio.run(life())


def test_closing_ends_the_thread_after_the_calls_that_came_before():
    async def life() -> None:
        held = Held()
        first = await held.first()
        before = held.add(1)
        await asyncio.sleep(0)
        closing = asyncio.create_task(held.thread.close())
        await asyncio.sleep(0)
        after = held.add(2)
        held.let_go.set()
        await asyncio.gather(first, before, closing)
        with pytest.raises(StoreError, match="is closed"):
            await after
        await held.thread.close()

    others = set(threading.enumerate())
    asyncio.run(life())
    for thread in set(threading.enumerate()) - others:
        thread.join()


def test_a_reader_sees_what_was_acknowledged_before_it_asked(tmp_path):
    async def life() -> None:
        file = str(tmp_path / "numbers.sqlite")
        db = connect(file)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY)")
        writer, reader = CallThread("write", db, commit_together), CallThread("read", connect(file), read_together)

        async def put_and_read(n: int) -> None:
            await writer.call(lambda db: insert(db, n))
            assert await reader.call(lambda db: db.execute("SELECT 1 FROM numbers WHERE n = ?", (n,)).fetchone())
            with pytest.raises(sqlite3.OperationalError):
                await reader.call(lambda db: db.execute("SELECT nonsense"))

        await asyncio.gather(*(put_and_read(n) for n in range(200)))
        await reader.close()
        await writer.close()

    asyncio.run(life())
