"""SQLite in memory: the experience store whose calls run to their end in the caller's thread, gone with the process.

One transaction per call. Because nothing waits, it also runs in virtual time.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.backends.tables import Tables, connect, query, transaction
from flexmarl.experience.interface import Column, Outcome, PartialRow, Row, Table
from flexmarl.records import AgentName, GroupId, PolicyName, RowState, SampleId


class SqliteStore:
    """An ExperienceStore without threads; `DurableStore` is the one that outlives the process."""

    def __init__(self, *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Lays out the tables of a new store, with the same data columns for every agent."""
        self._tables = Tables(agents, columns)
        self._open: sqlite3.Connection | None = connect(":memory:")
        with self._transaction("laying out the store") as db:
            self._tables.lay_out(db)

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        encoded = self._tables.encode(agent, rows)
        with self._transaction(f"putting rows into table {agent!r}") as db:
            self._tables.put(db, encoded)

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy to `holder`."""
        with self._transaction(f"claiming rows of policy {policy!r}") as db:
            return self._tables.claim(db, policy, n, holder)

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none."""
        with self._transaction(f"settling rows as {outcome.state}") as db:
            self._tables.settle(db, ids, outcome)

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        with self._transaction(f"releasing the rows of {cache or holder}") as db:
            return self._tables.release(db, holder, cache)

    async def rewind(self, next_group: GroupId) -> int:
        """Discards the rows of this and all younger groups, with their payloads."""
        with self._transaction(f"rewinding to group {next_group}") as db:
            return self._tables.rewind(db, next_group)

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of the oldest groups until the store is small enough."""
        pruned = 0
        while True:
            with self._transaction(f"pruning groups before {before_group}") as db:
                rows = self._tables.prune_one_group(db, before_group, budget_bytes)
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

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[sqlite3.Connection]:
        with boundary(StoreError, doing), transaction(self._connection()):
            yield self._connection()
