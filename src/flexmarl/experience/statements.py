"""SQL for the experience store's tables, in a file or in memory.

"solver", "verifier", ...   one table per agent: meta columns, data columns, and a status column for each data column
payloads                    key -> string, JSON text or tensor bytes that a data column refers to
samples                     sample id -> agent: an id is in one table only
tally                       (policy, state) -> rows, updated by `put` and by triggers, so that counting never scans
pruned                      one row: the groups below this id have been pruned

SELECT sample_id, payload(text), reward FROM solver WHERE reward_status

A tensor that begins with tensors of another row is stored as a chain: the payload keys of that beginning, and the
numbers that follow it.

    hop 0   prompt  [. . . .]          response  [. . .]
    hop 1   prompt  +key,key; [. .]    response  [. . . .]      begins with hop 0's prompt and response
    hop 2   prompt  +key,key; [.]      response  [. .]          begins with hop 1's, and so with hop 0's

The bytes of a whole tensor begin with its dtype, never with `+` (`schema.py`).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from flexmarl.errors import StoreError
from flexmarl.experience.interface import Column
from flexmarl.experience.ledger import ClaimOrder
from flexmarl.experience.schema import CODECS, decode_tensor, encode_tensor, quote, status_column
from flexmarl.records import ROW_TERMINAL, AgentName, RowState

AMONG = "IN (SELECT value FROM json_each(?))"
"""Takes a list of any length as one parameter, so that the statement is prepared once."""
OWNERS = f"SELECT sample_id, agent FROM samples WHERE sample_id {AMONG}"
ORDER = ", ".join(ClaimOrder._fields)
ROW_META = ("sample_id", "policy", "policy_version", "state", "next_agent_id", "cache", "settled_version", "reason")
SHARED_LAYOUT = (
    "CREATE TABLE payloads (key INTEGER PRIMARY KEY, value NOT NULL)",
    "CREATE TABLE samples (sample_id TEXT PRIMARY KEY, agent TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE tally (policy TEXT, state TEXT, n INTEGER NOT NULL, PRIMARY KEY (policy, state)) WITHOUT ROWID",
    "CREATE TABLE pruned (before_group INTEGER NOT NULL)",
    "INSERT INTO pruned VALUES (0)",
)
COUNT_OPENED = "INSERT INTO tally VALUES (?, 'open', ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
"""Run once per policy and put. A trigger for each row that opens would cost a third of the put."""


class Statements:
    """The SQL of one agent's table."""

    def __init__(self, agent: AgentName, columns: Sequence[Column]) -> None:
        self._name = quote(agent)
        self._references = [column.name for column in columns if CODECS[column.kind].by_reference]
        data = [column.name for column in columns]
        self.insert = lru_cache(self._insert)
        self.fill = lru_cache(self._fill)
        self.stored = lru_cache(self._stored)
        self.keys = lru_cache(self._keys)
        self.layout = list(self._layout(agent, columns))
        self.read = self._select([*ROW_META, *data], AMONG)
        self.own = f"INSERT INTO samples VALUES (?, {literal(agent)})"
        self.states = self._select(["sample_id", "state", "policy_version"], AMONG)
        self.ids = f"SELECT sample_id FROM {self._name} ORDER BY {ORDER}, sample_id"
        self.claim = f"UPDATE {self._name} SET state = 'claimed', holder = ? WHERE sample_id {AMONG}"
        self.settle = (
            f"UPDATE {self._name} SET state = ?, holder = NULL, cache = ?, settled_version = ?, reason = ? "
            f"WHERE sample_id {AMONG}"
        )
        self.place = (
            f"UPDATE {self._name} SET state = ?, holder = ?, cache = ?, settled_version = ?, reason = ? "
            f"WHERE sample_id = ?"
        )
        ready = f"UPDATE {self._name} SET state = 'ready', holder = NULL, cache = NULL, reason = ''"
        self.release_holder = f"{ready} WHERE holder = ? RETURNING sample_id"
        self.release_cache = f"{ready} WHERE cache = ? RETURNING sample_id"
        not_ended = ", ".join(f"'{state}'" for state in RowState if state not in ROW_TERMINAL)
        self.not_ended = (
            f"SELECT sample_id, state FROM {self._name} WHERE policy IN (SELECT policy FROM tally) "
            f"AND state IN ({not_ended}) AND group_id < ?1 "
            "AND group_id NOT IN (SELECT value FROM json_each(?2)) LIMIT 1"
        )
        played_again = f"FROM {self._name} WHERE group_id >= ?1 OR group_id IN (SELECT value FROM json_each(?2))"
        self.drop_payloads = self._payloads_of(played_again)
        self.drop = f"DELETE {played_again}"
        self.of_episodes = self._of_episodes()
        listed = f"FROM {self._name} WHERE sample_id IN (SELECT value FROM json_each(?1))"
        self.discard_payloads = self._payloads_of(listed)
        self.discard = f"DELETE {listed}"
        self.prune_payloads = self._payloads_of(f"FROM {self._name} WHERE {self._ended_in_group()}")
        open_rows = (
            f"FROM {self._name} WHERE policy IN (SELECT policy FROM tally) AND state IN ({not_ended}) AND group_id = ?2"
        )
        self.chains_not_ended = (
            f"SELECT key, value FROM payloads WHERE key IN ({self._keys_of(open_rows)}) "
            f"AND typeof(value) = 'blob' AND substr(value, 1, 1) = ?1"
        )
        forgotten = ", ".join(f"{quote(name)} = NULL" for name in self._references)
        self.prune = f"UPDATE {self._name} SET {forgotten or 'policy = policy'} WHERE {self._ended_in_group()}"

    def _insert(self, names: tuple[str, ...]) -> str:
        marks = ", ".join("?" * (len(names) + len(ClaimOrder._fields) + 2))
        listed = "".join(f", {quote(name)}" for name in names)
        return f"INSERT INTO {self._name} (sample_id, {ORDER}, policy{listed}) VALUES ({marks})"

    def _fill(self, names: tuple[str, ...]) -> str:
        return f"UPDATE {self._name} SET {', '.join(f'{quote(name)} = ?' for name in names)} WHERE sample_id = ?"

    def _stored(self, names: tuple[str, ...]) -> str:
        return self._select(["policy", *names], "= ?")

    def _keys(self, names: tuple[str, ...]) -> str:
        """Selects the keys of a row's payloads; NULL for a payload that is missing."""
        cells = [f"(SELECT key FROM payloads WHERE key = {quote(name)})" for name in names]
        return f"SELECT {', '.join(cells)} FROM {self._name} WHERE sample_id = ?"

    def _select(self, names: Sequence[str], which: str) -> str:
        """Selects the columns `names` of the rows whose sample id is `which`, with payloads in place of keys."""
        cells = [
            f"(SELECT value FROM payloads WHERE key = {quote(name)})" if name in self._references else quote(name)
            for name in names
        ]
        return f"SELECT {', '.join(cells)} FROM {self._name} WHERE sample_id {which}"

    def _of_episodes(self) -> str:
        """Selects the rows of a list of (group, episode, attempt). The tally has every policy and state that a row has,
        so one search in the index by state for each of these finds them.
        """
        of_one = " AND ".join(
            f"row.{column} = json_extract(asked.value, '$[{number}]')"
            for number, column in enumerate(ClaimOrder._fields[:3])
        )
        return (
            f"SELECT sample_id, row.state FROM json_each(?) AS asked CROSS JOIN tally CROSS JOIN {self._name} AS row "
            f"ON row.policy = tally.policy AND row.state = tally.state AND {of_one} WHERE tally.n > 0"
        )

    def _payloads_of(self, rows: str) -> str:
        return f"DELETE FROM payloads WHERE key IN ({self._keys_of(rows)})"

    def _keys_of(self, rows: str) -> str:
        """Selects the key of every payload of these rows."""
        return " UNION ALL ".join(f"SELECT {quote(name)} {rows}" for name in self._references) or f"SELECT NULL {rows}"

    def _ended_in_group(self) -> str:
        """The condition that a row of group ?1 has ended. It lists all policies, so that the index by state is used."""
        ended = ", ".join(f"'{state}'" for state in sorted(ROW_TERMINAL))
        return f"policy IN (SELECT policy FROM tally) AND state IN ({ended}) AND group_id = ?1"

    def _layout(self, agent: AgentName, columns: Sequence[Column]) -> Iterator[str]:
        """Yields the statements that make the table, its indexes and its triggers.

        A value that is set is never NULL. So a status column is computed from its value and cannot contradict it.
        """
        data = "".join(
            f", {quote(column.name)} {CODECS[column.kind].sql_type}, {quote(status_column(column.name))} BOOLEAN "
            f"GENERATED ALWAYS AS ({quote(column.name)} IS NOT NULL) VIRTUAL"
            for column in columns
        )
        count_new = "INSERT INTO tally VALUES (NEW.policy, NEW.state, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        uncount_old = "UPDATE tally SET n = n - 1 WHERE policy = OLD.policy AND state = OLD.state"
        yield (
            f"CREATE TABLE {self._name} (sample_id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, "
            f"episode_index INTEGER NOT NULL, attempt INTEGER NOT NULL, hop INTEGER NOT NULL, policy TEXT NOT NULL, "
            f"policy_version INTEGER, state TEXT NOT NULL DEFAULT 'open', "
            f"is_processing BOOLEAN GENERATED ALWAYS AS (state = 'accumulated') VIRTUAL, next_agent_id INTEGER, "
            f"holder TEXT, cache TEXT, settled_version INTEGER, reason TEXT NOT NULL DEFAULT ''{data}) WITHOUT ROWID"
        )
        yield f"CREATE INDEX {quote(f'{agent} by state')} ON {self._name} (policy, state, {ORDER})"
        yield f"CREATE INDEX {quote(f'{agent} by holder')} ON {self._name} (holder) WHERE holder IS NOT NULL"
        yield f"CREATE INDEX {quote(f'{agent} by cache')} ON {self._name} (cache) WHERE cache IS NOT NULL"
        yield (
            f"CREATE TRIGGER {quote(f'{agent} moved')} AFTER UPDATE OF state ON {self._name} BEGIN "
            f"{uncount_old}; {count_new}; END"
        )
        yield (
            f"CREATE TRIGGER {quote(f'{agent} dropped')} AFTER DELETE ON {self._name} BEGIN "
            f"DELETE FROM samples WHERE sample_id = OLD.sample_id; {uncount_old}; END"
        )


def claimable(agents: Sequence[AgentName]) -> str:
    """Selects a policy's first n READY rows over all tables: each index gives its first n, and these are merged."""
    firsts = [
        f"SELECT * FROM (SELECT {literal(agent)} AS agent, sample_id, {ORDER} FROM {quote(agent)} "
        f"WHERE policy = :policy AND state = 'ready' ORDER BY {ORDER}, sample_id LIMIT :n)"
        for agent in agents
    ]
    return f"SELECT agent, sample_id FROM ({' UNION ALL '.join(firsts)}) ORDER BY {ORDER}, sample_id LIMIT :n"


def literal(text: str) -> str:
    """Quotes a text as an SQL string.

    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


MARK = b"+"


def chain(keys: Sequence[int], tail: np.ndarray) -> bytes:
    """The payload of a tensor that begins with the tensors in payloads `keys` and ends with `tail`."""
    return MARK + ",".join(map(str, keys)).encode() + b";" + encode_tensor(tail)


def is_chain(stored: object) -> bool:
    """True if a cell's payload is a chain."""
    return isinstance(stored, bytes) and stored.startswith(MARK)


class PayloadChains:
    """Reads chains on one connection. It keeps every tensor that it has read, so each store call makes its own."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._read: dict[int, np.ndarray] = {}

    def whole(self, stored: bytes) -> np.ndarray:
        """The whole tensor in a payload, as a fresh copy."""
        parts: list[np.ndarray] = []
        while is_chain(stored):  # a loop, not recursion: a chain is as long as its conversation
            keys, tail = _split(stored)
            parts += [decode_tensor(tail), *(self._at(key) for key in reversed(keys[1:]))]
            if keys[0] in self._read:
                stored = b""
                parts.append(self._read[keys[0]])
            else:
                stored = self._payload(keys[0])
        if stored:
            parts.append(decode_tensor(stored))
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def beginning(self, keys: Sequence[int]) -> np.ndarray:
        """The tensors in these payloads, concatenated."""
        return np.concatenate([self._at(key) for key in keys])

    def _at(self, key: int) -> np.ndarray:
        if key not in self._read:
            self._read[key] = self.whole(self._payload(key))
        return self._read[key]

    def _payload(self, key: int) -> bytes:
        found = self._db.execute("SELECT value FROM payloads WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise StoreError(f"payload {key}, with which a tensor begins, is not there: the store is damaged")
        return found[0]


def _split(stored: bytes) -> tuple[list[int], bytes]:
    keys, _, tail = stored.removeprefix(MARK).partition(b";")
    return [int(key) for key in keys.split(b",")], tail
