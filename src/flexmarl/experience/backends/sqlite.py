"""SQLite in memory: the experience store whose calls run to their end in the caller's thread, gone with the process.

One transaction per call. Because nothing waits, it also runs in virtual time.
"""

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.backends.tables import Tables, connect, query, transaction
from flexmarl.experience.interface import Column, Outcome, PartialRow, Row, Table
from flexmarl.records import AgentName, GroupId, PolicyName, RowState, SampleId

Result = TypeVar("Result")


class SqliteStore:
    """An ExperienceStore without threads; `DurableStore` is the one that outlives the process."""

    def __init__(self, *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Lays out the tables of a new store, with the same data columns for every agent."""
        self._tables = Tables(agents, columns)
        self._open: sqlite3.Connection | None = connect(":memory:")
        self._write("laying out the store", self._tables.lay_out)

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        encoded = self._tables.encode(agent, rows)
        self._write(f"putting rows into table {agent!r}", lambda db: self._tables.put(db, encoded))

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy to `holder`."""
        doing = f"claiming rows of policy {policy!r}"
        return self._write(doing, lambda db: self._tables.claim(db, policy, n, holder))

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none."""
        self._write(f"settling rows as {outcome.state}", lambda db: self._tables.settle(db, ids, outcome))

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        doing = f"releasing the rows of {cache or holder}"
        return self._write(doing, lambda db: self._tables.release(db, holder, cache))

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Discards the rows of this and all younger groups, and of those played again, with their payloads."""
        doing = f"rewinding to group {next_group}"
        return self._write(doing, lambda db: self._tables.rewind(db, next_group, replay))

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of the oldest groups until the store is small enough."""
        doing = f"pruning groups before {before_group}"
        pruned = 0
        while True:
            rows = self._write(doing, lambda db: self._tables.prune_one_group(db, before_group, budget_bytes))
            if rows is None:
                return pruned
            pruned += rows

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id, in the order asked."""
        with boundary(StoreError, "reading rows"):
            return self._tables.get(self._connection(), ids)

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """How many rows of the policy are in each state (absent: none)."""
        with boundary(StoreError, f"counting rows of policy {policy!r}"):
            return self._tables.counts(self._connection(), policy)

    async def query(self, sql: str) -> Table:
        """Any one SELECT over the agents' tables and the shared ones."""
        return query(self._connection(), sql)

    async def close(self) -> None:
        """Ends it; calling it twice is no error."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            raise StoreError("the experience store is closed; open a new one")
        return self._open

    def _write(self, doing: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        db = self._connection()
        with boundary(StoreError, doing), transaction(db):
            return work(db)
