"""SQLite in memory: the experience store whose calls run to their end in the caller's thread, gone with the process.

One transaction per call. Because nothing waits, it also runs in virtual time.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.backends.sql_store import SqlStore
from flexmarl.experience.backends.tables import EncodedRows, Tables, connect, transaction
from flexmarl.experience.interface import Column
from flexmarl.records import AgentName

Result = TypeVar("Result")


class SqliteStore(SqlStore):
    """An ExperienceStore without threads; `DurableStore` is the one that outlives the process."""

    def __init__(self, *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Lays out the tables of a new store, with the same data columns for every agent."""
        super().__init__(Tables(agents, columns))
        self._open: sqlite3.Connection | None = connect(":memory:")
        with transaction(self._open):
            self._tables.lay_out(self._open)

    async def close(self) -> None:
        """Ends it; calling it twice is no error."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            raise StoreError("the experience store is closed; open a new one")
        return self._open

    async def _put(self, doing: str, rows: EncodedRows) -> None:
        await self._write(doing, lambda db: self._tables.put(db, rows))

    async def _write(self, doing: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        db = self._connection()
        with boundary(StoreError, doing), transaction(db):
            return work(db)

    async def _read(self, doing: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with boundary(StoreError, doing):
            return work(self._connection())
