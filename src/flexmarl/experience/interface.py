"""The experience store of FlexMARL section 4.2: one table per agent; meta, data and status columns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from flexmarl.records import AgentName, GroupId, PolicyName, RowState, SampleId, Version


class ColumnKind(StrEnum):
    """Type of a data column. Numbers are stored by value in the row, the rest by reference in the payload table."""

    __hash__ = str.__hash__  # an enum's own is slow, and every value written or read looks its kind up

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    TEXT = "text"
    JSON = "json"
    """Lists and mappings of plain values."""
    TENSOR = "tensor"
    """A numpy array of any dtype and shape."""


@dataclass(frozen=True, slots=True)
class Column:
    """A user-defined data column; its status column `{name}_status` says whether the value is there."""

    name: str
    kind: ColumnKind


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """A tensor of one dimension that begins with tensors of another row: only what follows them has to be kept.

    It is read back whole, equal to the last bit. Where the other row lacks a value it begins with, it is kept whole.
    """

    parent: SampleId
    """The other row: of the same group, since groups are dropped as a whole. Its table may be another agent's."""
    columns: tuple[str, ...]
    """The columns of `parent` whose tensors, one after the other, are the beginning."""
    value: np.ndarray
    """All of it, the beginning included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRow:
    """Some values of one row: the first `put` of a sample id opens the row, later ones fill it."""

    sample_id: SampleId
    policy: PolicyName
    values: Mapping[str, Any] = field(default_factory=dict)
    """Data columns; every named value's status becomes true. A value, once there, is not overwritten. A tensor may
    be given as `Extended`.
    """
    version: Version | None = None
    """Comes with the response; it is set once."""
    next_agent_id: int | None = None
    """Index (in the team's order) of the agent whose turn this one feeds, when known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as a reader sees it."""

    sample_id: SampleId
    agent: AgentName
    policy: PolicyName
    version: Version | None
    state: RowState
    next_agent_id: int | None
    cache: str | None
    """Name of the gradient cache that holds it, while ACCUMULATED."""
    settled_version: Version | None
    """The version it was trained into."""
    reason: str
    values: Mapping[str, Any]
    """Data columns that are there; the others are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where rows go next, and why. The move must be in ROW_MOVES."""

    state: RowState
    cache: str | None = None
    """Required for ACCUMULATED."""
    version: Version | None = None
    """Required for TRAINED: the version the update made."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class ExperienceStore(Protocol):
    """Reached the same way from every worker. Every call is atomic and, once it returned, durable as the backend is.

    Errors: StoreError names the table and the column or sample id; TransitionError a move that the life cycle lacks.
    A call that raises has changed nothing.
    """

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table; a sample id belongs to one table only."""
        ...

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy, over all its agents' tables, to `holder`; `get` reads them.

        In the order of (group, episode, hop), never of arrival.
        """
        ...

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows; all of them or none. READY needs a version: a row without a response is never trained."""
        ...

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns to READY the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache."""
        ...

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Takes back what a run did after a checkpoint: discards the rows of `next_group` and all younger groups, and
        of the older ones in `replay`, which were active.

        They are played again under the same ids. Returns how many rows it discarded. Raises StoreError, changing
        nothing, if a row of another older group has not ended: it cannot belong to this checkpoint.
        """
        ...

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Makes room: while the store is larger, the oldest groups before `before_group` lose their payloads.

        Of rows that have ended, strings, lists and tensors go (their status becomes false); numbers, states and
        versions stay. Call it after a checkpoint with its next group: a resume needs nothing older. Returns how many
        rows it pruned. One group at a time: other calls need not wait for all of it.
        """
        ...

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id, in the order asked."""
        ...

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """How many rows of the policy are in each state (absent: none)."""
        ...

    async def query(self, sql: str) -> Table:
        """Any one SELECT over the agents' tables; `payload(column)` shows a string, list or tensor as text or JSON."""
        ...

    async def close(self) -> None:
        """Ends it; calling it twice is no error."""
        ...
