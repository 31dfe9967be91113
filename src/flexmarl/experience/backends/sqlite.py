"""Experience stores on SQLite, in memory and on a file.

SqlStore       the methods that both stores share; a subclass decides where a connection runs
SqliteStore    in memory, lost with the process: each call is one transaction and runs to its end in the caller's
               thread; nothing waits, so the store also runs in virtual time
DurableStore   on a file with full sync, for real runs: what it acknowledged survives kill -9

One process owns the file (`create`, or `open` to resume); other processes `join` it. Each process has three threads:
one writes, one reads, and one merges the -wal file into the main file while the writer continues. SQLite's locks order
the writers of several processes, and readers never wait for writers.
"""

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.backends.call_thread import CallThread, Joinable, commit_together, read_together, run_alone
from flexmarl.experience.interface import Column, Outcome, PartialRow, Row, Table
from flexmarl.experience.store_file import (
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
from flexmarl.experience.transactions import EncodedRows, Tables, connect, joined_rows, query, transaction
from flexmarl.records import AgentName, EpisodeId, GroupId, PolicyName, RowState, SampleId

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]


class SqlStore(ABC):
    """The methods of an ExperienceStore as work for a connection; a subclass says how that work is run."""

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
        """Moves rows, all of them or none."""
        await self._write(f"settling rows as {outcome.state}", lambda db: self._tables.settle(db, ids, outcome))

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        doing = f"releasing the rows of {cache or holder}"
        return await self._write(doing, lambda db: self._tables.release(db, holder, cache))

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Deletes the rows of `next_group`, of all younger groups and of those in `replay`, with their payloads."""
        doing = f"rewinding to group {next_group}"
        return await self._write(doing, lambda db: self._tables.rewind(db, next_group, replay))

    async def discard(self, trajectories: Collection[EpisodeId]) -> int:
        """Deletes the OPEN rows of episodes that are played again, with their payloads."""
        doing = f"discarding the rows of {len(trajectories)} episodes"
        return await self._write(doing, lambda db: self._tables.discard(db, trajectories))

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of the oldest groups, one group per transaction, until the store fits `budget_bytes`."""
        doing = f"pruning groups before {before_group}"
        pruned = 0
        while True:
            rows = await self._write(doing, lambda db: self._tables.prune_one_group(db, before_group, budget_bytes))
            if rows is None:
                return pruned
            pruned += rows

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Reads rows by sample id, in the order of `ids`."""
        return await self._read("reading rows", lambda db: self._tables.get(db, ids))

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """Counts the policy's rows by state; a state without rows may be absent."""
        return await self._read(f"counting rows of policy {policy!r}", lambda db: self._tables.counts(db, policy))

    async def query(self, sql: str) -> Table:
        """Runs one SELECT over the agents' tables and the shared ones."""
        return await self._read("querying", lambda db: query(db, sql))

    @abstractmethod
    async def _put(self, doing: str, rows: EncodedRows) -> None:
        """Writes encoded rows."""

    @abstractmethod
    async def _write(self, doing: str, work: Work[Result]) -> Result:
        """Runs `work`, which writes, in one transaction. `doing` describes the work in error messages."""

    @abstractmethod
    async def _read(self, doing: str, work: Work[Result]) -> Result:
        """Runs `work`, which only reads. `doing` describes the work in error messages."""


class SqliteStore(SqlStore):
    """An ExperienceStore in memory, without threads. `DurableStore` is the store that outlives the process."""

    def __init__(self, *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Makes the tables of a new store, with the same data columns for every agent."""
        super().__init__(Tables(agents, columns))
        self._open: sqlite3.Connection | None = connect(":memory:")
        with transaction(self._open):
            self._tables.lay_out(self._open)

    async def close(self) -> None:
        """Closes the store. Calling it twice is allowed."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Put(Joinable):
    """A put on its way to the writer. Puts that wait together are written as one."""

    tables: Tables
    rows: EncodedRows

    def __call__(self, db: sqlite3.Connection) -> None:
        """Puts these rows."""
        self.tables.put(db, self.rows)

    def all_of(self, works: Sequence[Joinable]) -> Callable[[sqlite3.Connection], None]:
        """Returns one work that puts the rows of all `works`, joined by table."""

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
        """Bytes of payloads that had been put when the last merge began."""
        self._merging: asyncio.Future[None] | None = None
        with explained(path, "opening the experience store"):
            self._writer = CallThread("store/write", connect_file(path, wait_s=lock_wait_s), commit_together)
            self._reader = CallThread("store/read", connect_file(path, wait_s=lock_wait_s), read_together)
            self._merger = CallThread("store/merge", connect_file(path, wait_s=lock_wait_s), run_alone)

    @classmethod
    def create(
        cls, path: Path, *, agents: Sequence[AgentName], columns: Sequence[Column], lock_wait_s: float = LOCK_WAIT_S
    ) -> Self:
        """Makes a store in a new file, with the same data columns for every agent. Raises StoreError if it exists."""
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
        """Opens the store of a run to resume: SQLite recovers the last acknowledged call, and the file is checked.

        Call `rewind` next.
        """
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
        """Opens the store of a run that another process of this machine owns."""
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
        """Closes the store after all earlier calls. Calling it twice is allowed."""
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
