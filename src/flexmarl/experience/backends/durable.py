"""SQLite on a file with full sync: the experience store of real runs; what it acknowledged survives kill -9.

One process owns it (`create`, or `open` to resume), others join. In each process one thread writes and one reads;
SQLite's locks order the writers of several processes, and readers never wait for them. A third one merges the -wal file
in while the writer goes on.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from flexmarl.experience.backends.call_thread import CallThread, Joinable, commit_together, read_together, run_alone
from flexmarl.experience.backends.sql_store import SqlStore
from flexmarl.experience.backends.store_file import (
    LOCK_WAIT_S,
    MERGE_BYTES,
    Ownership,
    check_file,
    connect_file,
    explained,
    make_file,
    merge,
    read_layout,
    refuse_file,
    require_file,
)
from flexmarl.experience.backends.tables import EncodedRows, Tables, joined_rows
from flexmarl.experience.interface import Column
from flexmarl.records import AgentName

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Put(Joinable):
    """A put on its way to the writer: the turns of one moment are written as one."""

    tables: Tables
    rows: EncodedRows

    def __call__(self, db: sqlite3.Connection) -> None:
        """Puts these rows."""
        self.tables.put(db, self.rows)

    def all_of(self, works: Sequence[Joinable]) -> Callable[[sqlite3.Connection], None]:
        """Puts the rows of all of these, table by table."""

        def put(db: sqlite3.Connection) -> None:
            for rows in joined_rows([work.rows for work in works if isinstance(work, Put)]):
                self.tables.put(db, rows)

        return put


class DurableStore(SqlStore):
    """An ExperienceStore on one file of this machine: `create`, `open` or `join` it."""

    def __init__(self, path: Path, tables: Tables, *, owner: Ownership | None, lock_wait_s: float) -> None:
        super().__init__(tables)
        self._path = path
        self._owner = owner
        self._merged_bytes = 0
        """How many had been put when the last merge began."""
        self._merging: asyncio.Future[None] | None = None
        with explained(path, "opening the experience store"):
            self._writer = CallThread("store/write", connect_file(path, wait_s=lock_wait_s), commit_together)
            self._reader = CallThread("store/read", connect_file(path, wait_s=lock_wait_s), read_together)
            self._merger = CallThread("store/merge", connect_file(path, wait_s=lock_wait_s), run_alone)

    @classmethod
    def create(
        cls, path: Path, *, agents: Sequence[AgentName], columns: Sequence[Column], lock_wait_s: float = LOCK_WAIT_S
    ) -> Self:
        """A new store, with the same data columns for every agent; refuses a file that is there."""
        tables = Tables(agents, columns)
        owner = Ownership.of(path)
        try:
            refuse_file(path)
            make_file(path, tables)
            return cls(path, tables, owner=owner, lock_wait_s=lock_wait_s)
        except BaseException:
            owner.give_up()
            raise

    @classmethod
    def open(cls, path: Path, *, lock_wait_s: float = LOCK_WAIT_S) -> Self:
        """The store of a run that is to go on: recovered to the last acknowledged call, and checked. Then `rewind`."""
        require_file(path)
        owner = Ownership.of(path)
        try:
            tables = cls._layout(path, lock_wait_s, check=True)
            return cls(path, tables, owner=owner, lock_wait_s=lock_wait_s)
        except BaseException:
            owner.give_up()
            raise

    @classmethod
    def join(cls, path: Path, *, lock_wait_s: float = LOCK_WAIT_S) -> Self:
        """The store of a run whose owner is another process of this machine."""
        require_file(path)
        return cls(path, cls._layout(path, lock_wait_s, check=False), owner=None, lock_wait_s=lock_wait_s)

    @staticmethod
    def _layout(path: Path, lock_wait_s: float, *, check: bool) -> Tables:
        with explained(path, "opening the experience store"):
            db = connect_file(path, wait_s=lock_wait_s)
            try:
                tables = read_layout(path, db)
                if check:
                    check_file(path, db)
                return tables
            finally:
                db.close()

    async def _put(self, doing: str, rows: EncodedRows) -> None:
        await self._write(doing, Put(self._tables, rows))
        if self._tables.bytes_put > self._merged_bytes + MERGE_BYTES and (not self._merging or self._merging.done()):
            self._merged_bytes = self._tables.bytes_put
            self._merging = await self._merger.begin(merge)

    async def close(self) -> None:
        """Ends it once all calls have; calling it twice is no error."""
        try:
            await self._reader.close()
            await self._merger.close()
            await self._writer.close()
        finally:
            if self._owner is not None:
                self._owner.give_up()

    async def _write(self, doing: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with explained(self._path, doing):
            return await self._writer.call(work)

    async def _read(self, doing: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with explained(self._path, doing):
            return await self._reader.call(work)
