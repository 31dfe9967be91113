"""Store on SQL tables: what every experience store on SQLite does, wherever its connections run."""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from flexmarl.experience.backends.tables import EncodedRows, Tables, query
from flexmarl.experience.interface import Outcome, PartialRow, Row, Table
from flexmarl.records import AgentName, GroupId, PolicyName, RowState, SampleId

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]


class SqlStore(ABC):
    """The methods of an ExperienceStore as work for a connection; a store says how that work is done."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        await self._put(f"putting rows into table {agent!r}", self._tables.encode(agent, rows))

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy to `holder`."""
        doing = f"claiming rows of policy {policy!r}"
        return await self._write(doing, lambda db: self._tables.claim(db, policy, n, holder))

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none."""
        await self._write(f"settling rows as {outcome.state}", lambda db: self._tables.settle(db, ids, outcome))

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        doing = f"releasing the rows of {cache or holder}"
        return await self._write(doing, lambda db: self._tables.release(db, holder, cache))

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Discards the rows of this and all younger groups, and of those played again, with their payloads."""
        doing = f"rewinding to group {next_group}"
        return await self._write(doing, lambda db: self._tables.rewind(db, next_group, replay))

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of the oldest groups until the store is small enough."""
        doing = f"pruning groups before {before_group}"
        pruned = 0
        while True:
            rows = await self._write(doing, lambda db: self._tables.prune_one_group(db, before_group, budget_bytes))
            if rows is None:
                return pruned
            pruned += rows

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id, in the order asked."""
        return await self._read("reading rows", lambda db: self._tables.get(db, ids))

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """How many rows of the policy are in each state (absent: none)."""
        return await self._read(f"counting rows of policy {policy!r}", lambda db: self._tables.counts(db, policy))

    async def query(self, sql: str) -> Table:
        """Any one SELECT over the agents' tables and the shared ones."""
        return await self._read("querying", lambda db: query(db, sql))

    @abstractmethod
    async def _put(self, doing: str, rows: EncodedRows) -> None:
        """Writes encoded rows."""

    @abstractmethod
    async def _write(self, doing: str, work: Work[Result]) -> Result:
        """Does work that writes, in one transaction, `doing` something that an error names."""

    @abstractmethod
    async def _read(self, doing: str, work: Work[Result]) -> Result:
        """Does work that only reads."""
