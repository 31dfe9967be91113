"""SQLite on one file or in memory: the experience store, one transaction per call.

"solver", "verifier", ...   one table per agent: meta columns, data columns, a status column beside each of these
payloads                    key -> string, JSON text or tensor bytes that a data column refers to
samples                     sample id -> agent: an id is in one table only
tally                       (policy, state) -> rows, kept by triggers, so that counting never scans

SELECT s.sample_id, p.value AS text, s.reward FROM solver s JOIN payloads p ON p.key = s.text WHERE s.reward_status
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.interface import Column, Outcome, PartialRow, Row, Table
from flexmarl.experience.ledger import ClaimOrder, check_move, check_outcome, claim_order, set_once
from flexmarl.experience.schema import CODECS, Stored, check_names, decode, encode, quote, status_column
from flexmarl.records import ROW_TERMINAL, AgentName, GroupId, PolicyName, RowState, SampleId

AMONG = "IN (SELECT value FROM json_each(?))"
"""One parameter for a list of any length, so that the statement is prepared once."""
ORDER = ", ".join(ClaimOrder._fields)
ROW_META = ("sample_id", "policy", "policy_version", "state", "next_agent_id", "cache", "settled_version", "reason")
READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


class SqliteStore:
    """An ExperienceStore whose calls run to their end in the caller's thread, so that they also run in virtual time."""

    def __init__(self, path: str = ":memory:", *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Lays out the tables of a new store, with the same data columns for every agent."""
        check_names(agents, columns)
        self._columns = {column.name: column for column in columns}
        self._tables = {agent: _Statements(agent, columns) for agent in agents}
        self._claimable = _claimable_sql(agents)
        self._open: sqlite3.Connection | None = _connect(path)
        with self._transaction(f"laying out the store in {path}") as db:
            for statement in SHARED_LAYOUT:
                db.execute(statement)
            for table in self._tables.values():
                for statement in table.layout:
                    db.execute(statement)

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        table = self._table(agent)
        given: dict[SampleId, dict[str, Stored]] = {}
        for row in rows:
            so_far = given.setdefault(row.sample_id, {})
            so_far |= set_once(agent, row.sample_id, so_far, self._encode(agent, row))
        places = {sample_id: claim_order(sample_id) for sample_id in given}
        with self._transaction(f"putting rows into table {agent!r}") as db:
            there = self._stored(db, agent, given)
            fresh = {i: set_once(agent, i, there[i], cells) if i in there else cells for i, cells in given.items()}
            cells, payloads = self._by_reference(db, fresh)
            db.executemany("INSERT INTO payloads VALUES (?, ?)", payloads)
            db.executemany(
                table.upsert,
                [
                    (i, *places[i], given[i]["policy"], *(cells[i].get(column) for column in table.filled))
                    for i in fresh
                ],
            )

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy, over all its agents' tables, in the order of `ClaimOrder`."""
        if n < 0:
            raise StoreError(f"claim of {n} rows of policy {policy!r}; n must be at least 0")
        with self._transaction(f"claiming rows of policy {policy!r}") as db:
            found = db.execute(self._claimable, {"policy": policy, "n": n}).fetchall()
            for agent, ids in _by_agent(found).items():
                db.execute(self._table(agent).claim, (holder, json.dumps(ids)))
            return [sample_id for _, sample_id in found]

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none."""
        check_outcome(outcome)
        with self._transaction(f"settling rows as {outcome.state}") as db:
            for agent, of_agent in _by_agent(self._locate(db, ids)).items():
                table = self._table(agent)
                listed = json.dumps(of_agent)
                for sample_id, state, version in db.execute(table.states, (listed,)):
                    check_move(agent, sample_id, RowState(state), version, outcome)
                db.execute(table.settle, (outcome.state.value, outcome.cache, outcome.version, outcome.reason, listed))

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        if (holder is None) == (cache is None):
            raise StoreError(f"release takes a holder or a cache, got holder={holder!r} and cache={cache!r}")
        with self._transaction(f"releasing the rows of {cache or holder}") as db:
            released: list[SampleId] = []
            for table in self._tables.values():
                statement, owner = (table.release_holder, holder) if cache is None else (table.release_cache, cache)
                released += [sample_id for (sample_id,) in db.execute(statement, (owner,)).fetchall()]
            return sorted(released, key=claim_order)

    async def rewind(self, next_group: GroupId) -> int:
        """Discards the rows of this and all younger groups, with their payloads."""
        with self._transaction(f"rewinding to group {next_group}") as db:
            return sum(self._rewind(db, agent, table, next_group) for agent, table in self._tables.items())

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id, in the order asked."""
        with self._transaction("reading rows") as db:
            return self._read(db, self._locate(db, ids))

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """How many rows of the policy are in each state (absent: none)."""
        with self._transaction(f"counting rows of policy {policy!r}") as db:
            counted = db.execute("SELECT state, n FROM tally WHERE policy = ? AND n > 0", (policy,))
            return {RowState(state): n for state, n in counted}

    async def query(self, sql: str) -> Table:
        """Any read-only SQL over the agents' tables and the shared ones; anything that would write is refused."""
        with boundary(StoreError, f"query {sql!r} (one SELECT statement works)"):
            db = self._connection()
            db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
            try:
                cursor = db.execute(sql)
                names = tuple(column[0] for column in cursor.description or ())
                return Table(names, tuple(cursor.fetchall()))
            finally:
                db.set_authorizer(None)

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
        """All that is done in the block, or nothing of it."""
        db = self._connection()
        with boundary(StoreError, doing):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _table(self, agent: str) -> "_Statements":
        try:
            return self._tables[AgentName(agent)]
        except KeyError:
            raise StoreError(f"there is no table {agent!r}; there are: {', '.join(self._tables)}") from None

    def _rewind(self, db: sqlite3.Connection, agent: str, table: "_Statements", next_group: GroupId) -> int:
        unended = db.execute(table.unended, (next_group,)).fetchone()
        if unended:
            raise StoreError(
                f"table {agent!r}, row {unended[0]!r} is {unended[1]}, but groups before {next_group} have ended in "
                f"the checkpoint: the store is of another run, or has lost what came after it"
            )
        db.execute(table.drop_payloads, {"next_group": next_group})
        return db.execute(table.drop, {"next_group": next_group}).rowcount

    def _encode(self, agent: AgentName, row: PartialRow) -> dict[str, Stored]:
        cells: dict[str, Stored] = {"policy": row.policy}
        if row.version is not None:
            cells["policy_version"] = int(row.version)
        if row.next_agent_id is not None:
            cells["next_agent_id"] = int(row.next_agent_id)
        for name, value in row.values.items():
            column = self._columns.get(name)
            if column is None:
                raise StoreError(f"table {agent!r} has no column {name!r}; there are: {', '.join(self._columns)}")
            cells[name] = encode(agent, column, value)
        return cells

    def _stored(
        self, db: sqlite3.Connection, agent: AgentName, given: Mapping[SampleId, Mapping[str, Stored]]
    ) -> dict[SampleId, dict[str, Stored]]:
        """What is there already of the given cells, for the rows that exist."""
        owners = db.execute(f"SELECT sample_id, agent FROM samples WHERE sample_id {AMONG}", (json.dumps([*given]),))
        existing: list[SampleId] = []
        for sample_id, owner in owners:
            if owner != agent:
                raise StoreError(f"table {agent!r}: row {sample_id!r} is in table {owner!r} already")
            existing.append(sample_id)
        if not existing:
            return {}
        named = set().union(*(given[sample_id] for sample_id in existing))
        cells = ["policy", *(column for column in self._table(agent).filled if column in named)]
        found = db.execute(self._table(agent).select(["sample_id", *cells]), (json.dumps(existing),))
        return {
            sample_id: {name: cell for name, cell in zip(cells, row, strict=True) if cell is not None}
            for sample_id, *row in found
        }

    def _by_reference(
        self, db: sqlite3.Connection, fresh: Mapping[SampleId, Mapping[str, Stored]]
    ) -> tuple[dict[SampleId, dict[str, Stored]], list[tuple[int, Stored]]]:
        """The cells with keys in place of strings, lists and tensors, and the payloads under these keys."""
        ((last,),) = db.execute("SELECT coalesce(max(key), 0) FROM payloads")
        payloads: list[tuple[int, Stored]] = []
        cells: dict[SampleId, dict[str, Stored]] = {}
        for sample_id, values in fresh.items():
            cells[sample_id] = row = dict(values)
            for name, value in values.items():
                if name in self._columns and CODECS[self._columns[name].kind].by_reference:
                    row[name] = key = last + len(payloads) + 1
                    payloads.append((key, value))
        return cells, payloads

    def _locate(self, db: sqlite3.Connection, ids: Sequence[SampleId]) -> list[tuple[str, SampleId]]:
        """(agent, sample id) in the order asked."""
        found = dict(db.execute(f"SELECT sample_id, agent FROM samples WHERE sample_id {AMONG}", (json.dumps([*ids]),)))
        unknown = [sample_id for sample_id in ids if sample_id not in found]
        if unknown:
            raise StoreError(f"no table has row {unknown[0]!r} ({len(unknown)} of {len(ids)} ids are unknown)")
        return [(found[sample_id], sample_id) for sample_id in ids]

    def _read(self, db: sqlite3.Connection, located: Sequence[tuple[str, SampleId]]) -> list[Row]:
        rows: dict[SampleId, Row] = {}
        for agent, ids in _by_agent(located).items():
            for cells in db.execute(self._table(agent).read, (json.dumps(ids),)):
                row = self._row(AgentName(agent), cells)
                rows[row.sample_id] = row
        return [rows[sample_id] for _, sample_id in located]

    def _row(self, agent: AgentName, cells: Sequence[Any]) -> Row:
        sample_id, policy, version, state, next_agent_id, cache, settled_version, reason, *data = cells
        return Row(
            sample_id=sample_id,
            agent=agent,
            policy=policy,
            version=version,
            state=RowState(state),
            next_agent_id=next_agent_id,
            cache=cache,
            settled_version=settled_version,
            reason=reason,
            values={
                name: decode(column.kind, cell)
                for (name, column), cell in zip(self._columns.items(), data, strict=True)
                if cell is not None
            },
        )


def _connect(path: str) -> sqlite3.Connection:
    """A connection that begins no transaction of its own."""
    with boundary(StoreError, f"opening {path}"):
        return sqlite3.connect(path, isolation_level=None)


def _by_agent(located: Sequence[tuple[str, SampleId]]) -> dict[str, list[SampleId]]:
    ids: dict[str, list[SampleId]] = defaultdict(list)
    for agent, sample_id in located:
        ids[agent].append(sample_id)
    return ids


SHARED_LAYOUT = (
    "CREATE TABLE payloads (key INTEGER PRIMARY KEY, value NOT NULL)",
    "CREATE TABLE samples (sample_id TEXT PRIMARY KEY, agent TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE tally (policy TEXT, state TEXT, n INTEGER NOT NULL, PRIMARY KEY (policy, state)) WITHOUT ROWID",
)


class _Statements:
    """The SQL of one agent's table."""

    def __init__(self, agent: AgentName, columns: Sequence[Column]) -> None:
        self._name = quote(agent)
        self._references = {column.name for column in columns if CODECS[column.kind].by_reference}
        data = [column.name for column in columns]
        self.filled = ["policy_version", "next_agent_id", *data]
        """Columns that puts fill, each once, in the order of `upsert`."""
        self.layout = self._layout(agent, columns)
        self.read = self.select([*ROW_META, *data])
        self.states = self.select(["sample_id", "state", "policy_version"])
        filled = [quote(name) for name in self.filled]
        fill = ", ".join(f"{name} = coalesce({name}, excluded.{name})" for name in filled)
        self.upsert = (
            f"INSERT INTO {self._name} (sample_id, {ORDER}, policy, {', '.join(filled)}) "
            f"VALUES ({', '.join('?' * (len(filled) + len(ClaimOrder._fields) + 2))}) "
            f"ON CONFLICT (sample_id) DO UPDATE SET {fill}"
        )
        self.claim = f"UPDATE {self._name} SET state = 'claimed', holder = ? WHERE sample_id {AMONG}"
        self.settle = (
            f"UPDATE {self._name} SET state = ?, holder = NULL, cache = ?, settled_version = ?, reason = ? "
            f"WHERE sample_id {AMONG}"
        )
        ended = ", ".join(f"'{state}'" for state in sorted(ROW_TERMINAL))
        self.unended = (
            f"SELECT sample_id, state FROM {self._name} WHERE group_id < ? AND state NOT IN ({ended}) LIMIT 1"
        )
        younger = f"FROM {self._name} WHERE group_id >= :next_group"
        keys = " UNION ALL ".join(f"SELECT {quote(name)} {younger}" for name in sorted(self._references))
        self.drop_payloads = f"DELETE FROM payloads WHERE key IN ({keys or 'SELECT NULL'})"
        self.drop = f"DELETE {younger}"
        ready = f"UPDATE {self._name} SET state = 'ready', holder = NULL, cache = NULL, reason = ''"
        self.release_holder = f"{ready} WHERE holder = ? RETURNING sample_id"
        self.release_cache = f"{ready} WHERE cache = ? RETURNING sample_id"

    def select(self, names: Sequence[str]) -> str:
        """Reads these columns of the listed rows, with payloads in place of their keys."""
        cells = [
            f"(SELECT value FROM payloads WHERE key = {quote(name)})" if name in self._references else quote(name)
            for name in names
        ]
        return f"SELECT {', '.join(cells)} FROM {self._name} WHERE sample_id {AMONG}"

    def _layout(self, agent: AgentName, columns: Sequence[Column]) -> list[str]:
        """A value that is there is never NULL, so a status column is computed and cannot disagree with its value."""
        data = "".join(
            f", {quote(column.name)} {CODECS[column.kind].sql_type}, {quote(status_column(column.name))} BOOLEAN "
            f"GENERATED ALWAYS AS ({quote(column.name)} IS NOT NULL) VIRTUAL"
            for column in columns
        )
        literal = "'" + agent.replace("'", "''") + "'"
        count_new = "INSERT INTO tally VALUES (NEW.policy, NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        uncount_old = "UPDATE tally SET n = n - 1 WHERE policy = OLD.policy AND state = OLD.state"
        return [
            f"CREATE TABLE {self._name} (sample_id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, "
            f"episode_index INTEGER NOT NULL, attempt INTEGER NOT NULL, hop INTEGER NOT NULL, policy TEXT NOT NULL, "
            f"policy_version INTEGER, state TEXT NOT NULL DEFAULT 'open', "
            f"is_processing BOOLEAN GENERATED ALWAYS AS (state = 'accumulated') VIRTUAL, next_agent_id INTEGER, "
            f"holder TEXT, cache TEXT, settled_version INTEGER, reason TEXT NOT NULL DEFAULT ''{data}) WITHOUT ROWID",
            f"CREATE INDEX {quote(f'{agent} by state')} ON {self._name} (policy, state, {ORDER})",
            f"CREATE INDEX {quote(f'{agent} by holder')} ON {self._name} (holder) WHERE holder IS NOT NULL",
            f"CREATE INDEX {quote(f'{agent} by cache')} ON {self._name} (cache) WHERE cache IS NOT NULL",
            f"CREATE TRIGGER {quote(f'{agent} opened')} AFTER INSERT ON {self._name} BEGIN "
            f"INSERT INTO samples VALUES (NEW.sample_id, {literal}); {count_new}; END",
            f"CREATE TRIGGER {quote(f'{agent} moved')} AFTER UPDATE OF state ON {self._name} BEGIN "
            f"{uncount_old}; {count_new}; END",
            f"CREATE TRIGGER {quote(f'{agent} dropped')} AFTER DELETE ON {self._name} BEGIN "
            f"DELETE FROM samples WHERE sample_id = OLD.sample_id; {uncount_old}; END",
        ]


def _claimable_sql(agents: Sequence[AgentName]) -> str:
    """The first n READY rows of a policy over all tables: each index gives its first n in order, then they merge."""
    literals = ["'" + agent.replace("'", "''") + "'" for agent in agents]
    firsts = [
        f"SELECT * FROM (SELECT {literal} AS agent, sample_id, {ORDER} FROM {quote(agent)} "
        f"WHERE policy = :policy AND state = 'ready' ORDER BY {ORDER}, sample_id LIMIT :n)"
        for agent, literal in zip(agents, literals, strict=True)
    ]
    return f"SELECT agent, sample_id FROM ({' UNION ALL '.join(firsts)}) ORDER BY {ORDER}, sample_id LIMIT :n"
