"""SQLite file of an experience store, read only: to look into a run while it writes, or after it ended in any way."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexmarl.errors import StoreError
from flexmarl.experience.backends.store_file import connect_file, explained, read_layout, require_file
from flexmarl.experience.backends.tables import Tables, query, transaction
from flexmarl.experience.interface import Column, Row, Table
from flexmarl.records import AgentName

ROWS_AT_ONCE = 256
"""Rows that are decoded together; it bounds what an export of any size holds."""


class StoreReader:
    """Reads a store from any process. All calls block; none waits for the run that writes."""

    def __init__(self, path: Path, db: sqlite3.Connection, tables: Tables) -> None:
        self._path = path
        self._db = db
        self._tables = tables

    @property
    def agents(self) -> tuple[AgentName, ...]:
        """Agents, each with a table of that name."""
        return self._tables.agents

    @property
    def columns(self) -> tuple[Column, ...]:
        """Data columns of every agent's table."""
        return tuple(self._tables.columns.values())

    def query(self, sql: str) -> Table:
        """Any one SELECT; `payload(column)` shows a string, list or tensor as text or JSON.

        >>> reader.query("SELECT sample_id, payload(text), reward FROM solver LIMIT 2")  # doctest: +SKIP
        """
        with explained(self._path, "querying the experience store"):
            return query(self._db, sql)

    def rows(self, agent: AgentName) -> Iterator[Row]:
        """All rows of an agent's table as they are now, decoded, in the order in which they would be claimed."""
        with explained(self._path, f"reading table {agent!r}"), transaction(self._db, "BEGIN"):
            ids = self._tables.ids(self._db, agent)
            for first in range(0, len(ids), ROWS_AT_ONCE):
                yield from self._tables.get(self._db, ids[first : first + ROWS_AT_ONCE])


@contextmanager
def read_store(path: Path) -> Iterator[StoreReader]:
    """Opens the store for reading as long as the block lasts.

    After kill -9 too: what the run acknowledged is there. That takes a folder that can be written, for SQLite's index
    of the -wal file; in one that cannot, only a store that was closed can be read.
    """
    require_file(path)
    mode = "ro" if os.access(path.parent, os.W_OK) else _mode_without_writing(path)
    with explained(path, "opening the experience store"):
        db = connect_file(path, mode=mode)
    try:
        yield StoreReader(path, db, read_layout(path, db))
    finally:
        db.close()


def _mode_without_writing(path: Path) -> str:
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise StoreError(
            f"{path} was not closed and {path.parent} cannot be written, so its newest rows in {wal.name} cannot be "
            f"read here; copy both files into a folder of yours and read them there"
        )
    return "ro&immutable=1"
