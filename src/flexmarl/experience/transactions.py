"""SQLite tables of the experience store: the reads and writes of each store call, on a connection.

The caller begins and commits the transaction. Nothing here waits or locks: the store in memory calls it on the
caller's thread, the durable store on its own threads.
"""

import json
import sqlite3
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexmarl.errors import StoreError, boundary
from flexmarl.experience.interface import Column, Extended, Outcome, PartialRow, Row, Table
from flexmarl.experience.ledger import (
    RowStanding,
    check_begins,
    check_claim,
    check_discarded,
    check_extended,
    check_known,
    check_move,
    check_outcome,
    check_owner,
    check_released,
    check_rewound,
    claim_order,
    places_of,
    set_once,
)
from flexmarl.experience.schema import CODECS, Stored, as_text, check_names, decode, encode, encode_tensor, tensor_text
from flexmarl.experience.statements import (
    COUNT_OPENED,
    MARK,
    OWNERS,
    SHARED_LAYOUT,
    PayloadChains,
    Statements,
    chain,
    claimable,
    is_chain,
)
from flexmarl.records import AgentName, EpisodeId, GroupId, PolicyName, RowState, SampleId

READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
CACHED_STATEMENTS = 512
"""Each table needs a few for every set of columns filled together. Preparing a statement costs more than running it."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of one table as the database stores them; each sample id occurs once."""

    agent: AgentName
    policies: Mapping[SampleId, PolicyName]
    cells: Mapping[SampleId, Mapping[str, Stored]]
    extended: Mapping[tuple[SampleId, str], Extended] = field(default_factory=dict)
    """By sample id and column: the tensors in `cells` of which only the end must be stored."""


def joined_rows(puts: Sequence[EncodedRows]) -> list[EncodedRows]:
    """Joins puts into fewer: the puts of one table become one, unless a row occurs in two of them."""
    runs: list[list[EncodedRows]] = []
    newest: dict[AgentName, tuple[list[EncodedRows], set[SampleId]]] = {}
    for rows in puts:
        run, ids = newest.get(rows.agent, (None, set[SampleId]()))
        if run is None or not ids.isdisjoint(rows.cells):
            newest[rows.agent] = run, ids = [], set[SampleId]()
            runs.append(run)
        run.append(rows)
        ids.update(rows.cells)
    return [_as_one(run) for run in runs]


def _as_one(run: Sequence[EncodedRows]) -> EncodedRows:
    policies: dict[SampleId, PolicyName] = {}
    cells: dict[SampleId, Mapping[str, Stored]] = {}
    extended: dict[tuple[SampleId, str], Extended] = {}
    for rows in run:
        policies.update(rows.policies)
        cells.update(rows.cells)
        extended.update(rows.extended)
    return EncodedRows(run[0].agent, policies, cells, extended)


class Tables:
    """The tables of one store: their agents and data columns."""

    def __init__(self, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        check_names(agents, columns)
        self.agents = tuple(agents)
        self.columns = {column.name: column for column in columns}
        self._references = {column.name for column in columns if CODECS[column.kind].by_reference}
        self._tables = {agent: Statements(agent, columns) for agent in agents}
        self._claimable = claimable(agents)
        self.bytes_put = 0
        """Bytes of all strings, lists and tensors that were put through these tables."""

    def lay_out(self, db: sqlite3.Connection) -> None:
        """Makes the tables in a database that has none of them. The caller has begun a transaction."""
        for statement in (*SHARED_LAYOUT, *(line for table in self._tables.values() for line in table.layout)):
            db.execute(statement)

    def encode(self, agent: AgentName, rows: Sequence[PartialRow]) -> EncodedRows:
        """Encodes rows for `put`, without a connection. Raises StoreError for what no table of this store takes."""
        self._table(agent)
        policies: dict[SampleId, PolicyName] = {}
        cells: dict[SampleId, Mapping[str, Stored]] = {}
        extended: dict[tuple[SampleId, str], Extended] = {}
        for row in rows:
            sample_id, given = row.sample_id, self._encode(agent, row, extended)
            if sample_id in cells:
                set_once(agent, sample_id, {"policy": policies[sample_id]}, {"policy": row.policy})
                given = {**set_once(agent, sample_id, cells[sample_id], given), **cells[sample_id]}
            policies[sample_id], cells[sample_id] = row.policy, given
        check_extended(agent, extended)
        return EncodedRows(agent, policies, cells, extended)

    def put(self, db: sqlite3.Connection, rows: EncodedRows) -> None:
        """Opens or fills these rows."""
        known = self._known(db, rows)
        payloads, chains = _Payloads(db, self._references), PayloadChains(db)
        for sample_id in known:
            self._fill(db, payloads, chains, rows, sample_id)
        self._open(db, payloads, chains, rows, [sample_id for sample_id in rows.cells if sample_id not in known])
        self.bytes_put += payloads.write()

    def copy_in(self, db: sqlite3.Connection, rows: EncodedRows, places: Mapping[SampleId, RowStanding]) -> None:
        """Adds rows of another store, each at its place in its life."""
        self.put(db, rows)
        cells = [(p.state.value, p.holder, p.cache, p.settled_version, p.reason, i) for i, p in places.items()]
        db.executemany(self._table(rows.agent).place, cells)

    def claim(self, db: sqlite3.Connection, policy: PolicyName, n: int, holder: str) -> list[SampleId]:
        """Leases up to n READY rows of the policy, over all its agents' tables, in the order of `ClaimOrder`."""
        check_claim(policy, n)
        found = db.execute(self._claimable, {"policy": policy, "n": n}).fetchall()
        for agent, ids in _by_agent(found).items():
            db.execute(self._table(agent).claim, (holder, json.dumps(ids)))
        return [sample_id for _, sample_id in found]

    def settle(self, db: sqlite3.Connection, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Checks and makes the moves, table by table. If a check raises, the caller's transaction undoes all moves."""
        check_outcome(outcome)
        for agent, of_agent in _by_agent(self._locate(db, ids)).items():
            table = self._table(agent)
            listed = json.dumps(of_agent)
            for sample_id, state, version in db.execute(table.states, (listed,)):
                check_move(agent, sample_id, RowState(state), version, outcome)
            db.execute(table.settle, (outcome.state.value, outcome.cache, outcome.version, outcome.reason, listed))

    def release(self, db: sqlite3.Connection, holder: str | None, cache: str | None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        check_released(holder, cache)
        released: list[SampleId] = []
        for table in self._tables.values():
            statement, owner = (table.release_holder, holder) if cache is None else (table.release_cache, cache)
            released += [sample_id for (sample_id,) in db.execute(statement, (owner,)).fetchall()]
        return sorted(released, key=claim_order)

    def rewind(self, db: sqlite3.Connection, next_group: GroupId, replay: Collection[GroupId]) -> int:
        """Deletes the rows of `next_group`, of all younger groups and of those in `replay`, with their payloads."""
        which = (next_group, json.dumps(sorted(replay)))
        for agent, table in self._tables.items():
            not_ended = db.execute(table.not_ended, which).fetchone()
            if not_ended:
                check_rewound(agent, not_ended[0], RowState(not_ended[1]), next_group)
        db.execute("UPDATE pruned SET before_group = min(before_group, ?)", (min([next_group, *replay]),))
        dropped = 0
        for table in self._tables.values():
            db.execute(table.drop_payloads, which)
            dropped += db.execute(table.drop, which).rowcount
        return dropped

    def discard(self, db: sqlite3.Connection, trajectories: Collection[EpisodeId]) -> int:
        """Deletes the OPEN rows of these episodes with their payloads. It finds them by the index by state."""
        which = json.dumps([*places_of(trajectories)])
        found = {agent: db.execute(table.of_episodes, (which,)).fetchall() for agent, table in self._tables.items()}
        check_discarded((agent, row[0], RowState(row[1])) for agent, rows in found.items() for row in rows)
        groups = [claim_order(sample_id).group_id for rows in found.values() for sample_id, _ in rows]
        if groups:
            db.execute("UPDATE pruned SET before_group = min(before_group, ?)", (min(groups),))
        for agent, rows in found.items():
            listed = json.dumps([sample_id for sample_id, _ in rows])
            db.execute(self._tables[agent].discard_payloads, (listed,))
            db.execute(self._tables[agent].discard, (listed,))
        return len(groups)

    def prune_one_group(self, db: sqlite3.Connection, before_group: GroupId, budget_bytes: int) -> int | None:
        """Deletes the payloads (texts, lists, tensors) of the oldest group's ended rows. Returns the number of rows.

        The rows keep their numbers and states. The group is the oldest that was not pruned yet. Returns None if the
        store fits `budget_bytes`, or if no group before `before_group` is left.
        """
        ((group,),) = db.execute("SELECT before_group FROM pruned")
        if group >= before_group or used_bytes(db) <= budget_bytes:
            return None
        db.execute("UPDATE pruned SET before_group = ?", (group + 1,))
        self._make_whole(db, group)
        for table in self._tables.values():
            db.execute(table.prune_payloads, (group,))
        return sum(db.execute(table.prune, (group,)).rowcount for table in self._tables.values())

    def _make_whole(self, db: sqlite3.Connection, group: GroupId) -> None:
        """Stores whole the chains of the group's open rows: the payloads they begin with may be those of ended rows."""
        chains = PayloadChains(db)
        for table in self._tables.values():
            for key, stored in db.execute(table.chains_not_ended, (MARK, group)).fetchall():
                db.execute("UPDATE payloads SET value = ? WHERE key = ?", (encode_tensor(chains.whole(stored)), key))

    def get(self, db: sqlite3.Connection, ids: Sequence[SampleId]) -> list[Row]:
        """Reads rows by sample id, in the order of `ids`."""
        rows: dict[SampleId, Row] = {}
        chains = PayloadChains(db)
        for agent, of_agent in _by_agent(self._locate(db, ids)).items():
            for cells in db.execute(self._table(agent).read, (json.dumps(of_agent),)):
                rows[cells[0]] = self._row(AgentName(agent), cells, chains)
        return [rows[sample_id] for sample_id in ids]

    def counts(self, db: sqlite3.Connection, policy: PolicyName) -> Mapping[RowState, int]:
        """Counts the policy's rows by state; a state without rows is left out."""
        counted = db.execute("SELECT state, n FROM tally WHERE policy = ? AND n > 0", (policy,))
        return {RowState(state): n for state, n in counted}

    def ids(self, db: sqlite3.Connection, agent: AgentName) -> list[SampleId]:
        """All sample ids of an agent's table, in the order of `ClaimOrder`."""
        return [sample_id for (sample_id,) in db.execute(self._table(agent).ids)]

    def _table(self, agent: str) -> Statements:
        try:
            return self._tables[AgentName(agent)]
        except KeyError:
            raise StoreError(f"there is no table {agent!r}; there are: {', '.join(self._tables)}") from None

    def _encode(
        self, agent: AgentName, row: PartialRow, extended: dict[tuple[SampleId, str], Extended]
    ) -> dict[str, Stored]:
        """Encodes the cells of a row; adds to `extended` those that are given as `Extended`."""
        cells: dict[str, Stored] = {}
        if row.version is not None:
            cells["policy_version"] = int(row.version)
        if row.next_agent_id is not None:
            cells["next_agent_id"] = int(row.next_agent_id)
        for name, value in row.values.items():
            column = self.columns.get(name)
            if column is None:
                raise StoreError(f"table {agent!r} has no column {name!r}; there are: {', '.join(self.columns)}")
            if isinstance(value, Extended):
                extended[row.sample_id, name] = value
                cells[name] = encode(agent, column, value.value)
            else:
                cells[name] = encode(agent, column, value)
        return cells

    def _known(self, db: sqlite3.Connection, rows: EncodedRows) -> list[SampleId]:
        """The sample ids that the table has already. Raises StoreError for an id that another table has."""
        owners = dict(db.execute(OWNERS, (json.dumps([*rows.cells]),)))
        for sample_id, owner in owners.items():
            check_owner(rows.agent, sample_id, owner)
        return [sample_id for sample_id in rows.cells if sample_id in owners]

    def _fill(
        self,
        db: sqlite3.Connection,
        payloads: "_Payloads",
        chains: PayloadChains,
        rows: EncodedRows,
        sample_id: SampleId,
    ) -> None:
        """Sets the values that a row lacks. Raises StoreError for a value that differs from the stored one."""
        table, given = self._table(rows.agent), rows.cells[sample_id]
        names = ("policy", *given)
        (found,) = db.execute(table.stored(tuple(given)), (sample_id,))
        there = {
            name: encode_tensor(chains.whole(cell)) if is_chain(cell) else cell
            for name, cell in zip(names, found, strict=True)
            if cell is not None
        }
        fresh = set_once(rows.agent, sample_id, there, {"policy": rows.policies[sample_id], **given})
        if fresh:
            kept = self._shortened(db, chains, rows, sample_id, fresh)
            db.execute(table.fill(tuple(kept)), (*payloads.by_reference(kept), sample_id))

    def _open(
        self,
        db: sqlite3.Connection,
        payloads: "_Payloads",
        chains: PayloadChains,
        rows: EncodedRows,
        new: Sequence[SampleId],
    ) -> None:
        """Inserts new rows. Rows with the same columns share one statement, which gives a put most of its speed."""
        table = self._table(rows.agent)
        opened: dict[tuple[str, ...], list[tuple[Any, ...]]] = defaultdict(list)
        for sample_id in new:
            given = rows.cells[sample_id]
            if rows.extended:
                given = self._shortened(db, chains, rows, sample_id, given)
            meta = (sample_id, *claim_order(sample_id), rows.policies[sample_id])
            opened[tuple(given)].append((*meta, *payloads.by_reference(given)))
        for names, cells in opened.items():
            db.executemany(table.insert(names), cells)
        db.executemany(table.own, [(sample_id,) for sample_id in new])
        db.executemany(COUNT_OPENED, Counter(rows.policies[sample_id] for sample_id in new).items())

    def _shortened(
        self,
        db: sqlite3.Connection,
        chains: PayloadChains,
        rows: EncodedRows,
        sample_id: SampleId,
        cells: Mapping[str, Stored],
    ) -> Mapping[str, Stored]:
        """The cells, with a chain in place of each tensor that begins with tensors of another row."""
        chained: dict[str, Stored] = {}
        for name in cells:
            extended = rows.extended.get((sample_id, name))
            keys = self._payload_keys(db, extended) if extended else None
            if extended is None or keys is None:
                continue
            beginning = chains.beginning(keys)
            check_begins(rows.agent, sample_id, name, extended, beginning)
            chained[name] = chain(keys, extended.value[len(beginning) :])
        return {**cells, **chained} if chained else cells

    def _payload_keys(self, db: sqlite3.Connection, extended: Extended) -> list[int] | None:
        """Payload keys of the tensors that it begins with; None if one of them is missing (not yet put, or pruned)."""
        found = db.execute(OWNERS, (json.dumps([extended.parent]),)).fetchone()
        if found is None:
            return None
        (keys,) = db.execute(self._table(found[1]).keys(extended.columns), (extended.parent,))
        return None if None in keys else list(keys)

    def _locate(self, db: sqlite3.Connection, ids: Sequence[SampleId]) -> list[tuple[str, SampleId]]:
        """Finds (agent, sample id) of each id, in the order of `ids`. Raises StoreError for an unknown id."""
        found = dict(db.execute(OWNERS, (json.dumps([*ids]),)))
        check_known(ids, found)
        return [(found[sample_id], sample_id) for sample_id in ids]

    def _row(self, agent: AgentName, cells: Sequence[Any], chains: PayloadChains) -> Row:
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
                name: chains.whole(cell) if is_chain(cell) else decode(column.kind, cell)
                for (name, column), cell in zip(self.columns.items(), data, strict=True)
                if cell is not None
            },
        )


class _Payloads:
    """The payloads of one put: each gets its key immediately, and all values are written together."""

    def __init__(self, db: sqlite3.Connection, references: Container[str]) -> None:
        self._db = db
        self._references = references
        self._values: list[str | bytes] = []
        ((self._first_key,),) = db.execute("SELECT coalesce(max(key), 0) + 1 FROM payloads")

    def by_reference(self, cells: Mapping[str, Stored]) -> list[Stored]:
        """The cells, with keys in place of strings, lists and tensors."""
        row: list[Stored] = []
        for name, cell in cells.items():
            if name in self._references:
                assert isinstance(cell, str | bytes)
                row.append(self._first_key + len(self._values))
                self._values.append(cell)
            else:
                row.append(cell)
        return row

    def write(self) -> int:
        """Writes the values under their keys; returns their size in bytes."""
        self._db.executemany("INSERT INTO payloads VALUES (?, ?)", enumerate(self._values, self._first_key))
        return sum(map(len, self._values))


class StoreConnection(sqlite3.Connection):
    """A connection to which its own SQL function has a weak reference: SQLite would keep both for ever otherwise."""


def connect(database: str, *, wait_s: float = 0.0) -> sqlite3.Connection:
    """Opens a connection with the SQL function `payload(key)`, for use in any one thread.

    It begins no transaction by itself.
    """
    db = sqlite3.connect(
        database,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=CACHED_STATEMENTS,
        timeout=wait_s,
        uri=database.startswith("file:"),
        factory=StoreConnection,
    )
    own = weakref.ref(db)

    def payload(key: int | None) -> str | None:
        db = own()
        assert db is not None, "a connection that is gone asks for nothing"
        found = db.execute("SELECT value FROM payloads WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        return tensor_text(PayloadChains(db).whole(found[0])) if is_chain(found[0]) else as_text(found[0])

    db.create_function("payload", 1, payload)
    return db


@contextmanager
def transaction(db: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Runs the block in a transaction: commits at its end, rolls back at an error."""
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def query(db: sqlite3.Connection, sql: str) -> Table:
    """Runs one SELECT. Raises StoreError for a statement that would write."""
    with boundary(StoreError, f"query {sql!r} (one SELECT statement works)"):
        db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
        try:
            cursor = db.execute(sql)
            names = tuple(column[0] for column in cursor.description or ())
            return Table(names, tuple(cursor.fetchall()))
        finally:
            db.set_authorizer(None)


def used_bytes(db: sqlite3.Connection) -> int:
    """Size of the database in bytes, without its free pages."""
    ((pages, free, size),) = db.execute(
        "SELECT p.page_count, f.freelist_count, s.page_size "
        "FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s"
    )
    return (pages - free) * size


def _by_agent(located: Sequence[tuple[str, SampleId]]) -> dict[str, list[SampleId]]:
    ids: dict[str, list[SampleId]] = defaultdict(list)
    for agent, sample_id in located:
        ids[agent].append(sample_id)
    return ids
