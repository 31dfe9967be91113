"""Experience store on dictionaries, for virtual time: a simulation puts some 100,000 rows, piece by piece.

    put ──► row, as the SQLite stores encode it ──► settled READY ──► heap of its policy ──► claim
                        │
                        '── query: copied into SQLite in memory, because queries are rare

No call waits, and nothing outlives the process.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexmarl.errors import StoreError
from flexmarl.experience.interface import Column, Extended, Outcome, PartialRow, Row, Table
from flexmarl.experience.ledger import (
    ClaimOrder,
    RowStanding,
    check_begins,
    check_claim,
    check_discarded,
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
from flexmarl.experience.schema import CODECS, Stored, decode
from flexmarl.experience.transactions import EncodedRows, Tables, connect, query, transaction
from flexmarl.records import ROW_TERMINAL, AgentName, EpisodeId, GroupId, PolicyName, RowState, SampleId

OPEN = RowStanding(RowState.OPEN)


@dataclass(slots=True, eq=False)
class _Kept:
    """One row and its state."""

    sample_id: SampleId
    agent: AgentName
    policy: PolicyName
    order: ClaimOrder
    cells: dict[str, Any]
    """All values put so far, including the version and the next agent."""
    place: RowStanding = OPEN


class SimulatedStore:
    """An ExperienceStore on dictionaries: to put, claim, settle or get a row takes microseconds."""

    def __init__(self, *, agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
        """Makes an empty store with the same data columns for every agent."""
        self._tables = Tables(agents, columns)
        self._kinds = {column.name: column.kind for column in columns}
        self._references = [column.name for column in columns if CODECS[column.kind].by_reference]
        self._rows: dict[SampleId, _Kept] = {}
        self._ready: dict[PolicyName, list[tuple[ClaimOrder, SampleId]]] = defaultdict(list)
        """For each policy a heap of READY rows. A row that has left READY stays in it until it is popped."""
        self._counts: dict[PolicyName, Counter[RowState]] = defaultdict(Counter)
        self._pruned = GroupId(0)
        """Payloads of groups before this one have been dropped."""
        self._open = True

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        self._check_open()
        encoded = self._tables.encode(agent, rows)
        for (sample_id, name), extended in encoded.extended.items():
            self._check_begins(agent, sample_id, name, extended)
        changes = [self._change(encoded, sample_id) for sample_id in encoded.cells]
        for row, fresh in changes:
            if row.sample_id not in self._rows:
                self._rows[row.sample_id] = row
                self._counts[row.policy][RowState.OPEN] += 1
            row.cells.update(fresh)

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy to `holder`."""
        self._check_open()
        check_claim(policy, n)
        heap, claimed = self._ready[policy], RowStanding(RowState.CLAIMED, holder=holder)
        ids: list[SampleId] = []
        while heap and len(ids) < n:
            row = self._rows.get(heapq.heappop(heap)[1])
            if row is not None and row.policy == policy and row.place.state is RowState.READY:
                self._move(row, claimed)
                ids.append(row.sample_id)
        return ids

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none."""
        check_outcome(outcome)
        place = RowStanding(outcome.state, cache=outcome.cache, settled_version=outcome.version, reason=outcome.reason)
        rows = self._located(ids)
        for row in rows:
            check_move(row.agent, row.sample_id, row.place.state, row.cells.get("policy_version"), outcome)
        for row in rows:
            self._move(row, place)

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Makes READY again the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache.

        Returns their ids. Raises StoreError unless exactly one of `holder` and `cache` is given.
        """
        self._check_open()
        check_released(holder, cache)
        lost = [
            row
            for row in self._in_order()
            if (row.place.cache == cache if cache is not None else row.place.holder == holder)
        ]
        for row in lost:
            self._move(row, RowStanding(RowState.READY))
        return [row.sample_id for row in lost]

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Discards the rows of `next_group`, of all younger groups and of groups in `replay`; returns how many."""
        self._check_open()
        again = frozenset(replay)
        discarded = {row.sample_id for row in self._rows.values() if _group(row) >= next_group or _group(row) in again}
        for row in self._rows.values():
            if row.sample_id not in discarded:
                check_rewound(row.agent, row.sample_id, row.place.state, next_group)
        for sample_id in discarded:
            self._drop(sample_id)
        self._pruned = min(self._pruned, next_group, *again)
        return len(discarded)

    async def discard(self, trajectories: Collection[EpisodeId]) -> int:
        """Deletes the OPEN rows of these episodes; returns how many. It looks at every row: it follows a rare fault."""
        self._check_open()
        places = places_of(trajectories)
        rows = [row for row in self._rows.values() if row.order[:3] in places]
        check_discarded((row.agent, row.sample_id, row.place.state) for row in rows)
        for row in rows:
            self._drop(row.sample_id)
        self._pruned = min([self._pruned, *(GroupId(_group(row)) for row in rows)])
        return len(rows)

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of rows that have ended, oldest groups first, while the store is larger than the budget.

        Groups from `before_group` on keep theirs. Returns the number of rows pruned.
        """
        self._check_open()
        ended: dict[int, list[_Kept]] = defaultdict(list)
        for row in self._rows.values():
            if row.place.state in ROW_TERMINAL:
                ended[_group(row)].append(row)
        used, pruned = sum(self._payload_bytes(row) for row in self._rows.values()), 0
        while self._pruned < before_group and used > budget_bytes:
            for row in ended[self._pruned]:
                used -= self._payload_bytes(row)
                pruned += 1
                for name in self._references:
                    row.cells.pop(name, None)
            self._pruned = GroupId(self._pruned + 1)
        return pruned

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id, in the order asked."""
        return [self._row(row) for row in self._located(ids)]

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """Counts the policy's rows by state. A state without rows is absent."""
        self._check_open()
        return {state: n for state, n in self._counts[policy].items() if n}

    async def query(self, sql: str) -> Table:
        """Runs one SELECT on a copy of all rows, made for this call."""
        self._check_open()
        with closing(connect(":memory:")) as db:
            with transaction(db):
                self._tables.lay_out(db)
                for rows, places in self._by_agent():
                    self._tables.copy_in(db, rows, places)
            return query(db, sql)

    async def close(self) -> None:
        """Closes the store. It may be called twice."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("the experience store is closed; open a new one")

    def _change(self, encoded: EncodedRows, sample_id: SampleId) -> tuple[_Kept, dict[str, Stored]]:
        """Returns the row, perhaps a new one, and the cells it lacks. Raises StoreError for what it cannot take."""
        agent, policy, given = encoded.agent, encoded.policies[sample_id], encoded.cells[sample_id]
        row = self._rows.get(sample_id)
        if row is None:
            return _Kept(sample_id, agent, policy, claim_order(sample_id), {}), dict(given)
        check_owner(agent, sample_id, row.agent)
        set_once(agent, sample_id, {"policy": row.policy}, {"policy": policy})
        return row, set_once(agent, sample_id, row.cells, given)

    def _check_begins(self, agent: AgentName, sample_id: SampleId, name: str, extended: Extended) -> None:
        parent = self._rows.get(extended.parent)
        if parent is not None and all(column in parent.cells for column in extended.columns):
            beginning = [decode(self._kinds[column], parent.cells[column]) for column in extended.columns]
            check_begins(agent, sample_id, name, extended, np.concatenate(beginning))

    def _drop(self, sample_id: SampleId) -> None:
        row = self._rows.pop(sample_id)
        self._counts[row.policy][row.place.state] -= 1

    def _move(self, row: _Kept, place: RowStanding) -> None:
        counts = self._counts[row.policy]
        counts[row.place.state] -= 1
        counts[place.state] += 1
        row.place = place
        if place.state is RowState.READY:
            heapq.heappush(self._ready[row.policy], (row.order, row.sample_id))

    def _located(self, ids: Sequence[SampleId]) -> list[_Kept]:
        self._check_open()
        check_known(ids, self._rows)
        return [self._rows[sample_id] for sample_id in ids]

    def _in_order(self) -> list[_Kept]:
        return sorted(self._rows.values(), key=lambda row: (row.order, row.sample_id))

    def _payload_bytes(self, row: _Kept) -> int:
        payloads = (row.cells.get(name, b"") for name in self._references)
        return sum(len(payload) for payload in payloads if isinstance(payload, str | bytes))

    def _row(self, row: _Kept) -> Row:
        cells, place = row.cells, row.place
        return Row(
            sample_id=row.sample_id,
            agent=row.agent,
            policy=row.policy,
            version=cells.get("policy_version"),
            state=place.state,
            next_agent_id=cells.get("next_agent_id"),
            cache=place.cache,
            settled_version=place.settled_version,
            reason=place.reason,
            values={name: decode(kind, cells[name]) for name, kind in self._kinds.items() if name in cells},
        )

    def _by_agent(self) -> Iterator[tuple[EncodedRows, Mapping[SampleId, RowStanding]]]:
        rows: dict[AgentName, list[_Kept]] = defaultdict(list)
        for row in self._in_order():
            rows[row.agent].append(row)
        for agent, kept in rows.items():
            policies = {row.sample_id: row.policy for row in kept}
            cells: dict[SampleId, Mapping[str, Any]] = {row.sample_id: row.cells for row in kept}
            yield EncodedRows(agent, policies, cells), {row.sample_id: row.place for row in kept}


def _group(row: _Kept) -> int:
    return row.order.group_id
