"""Interface of the experience store (FlexMARL section 4.2): one table per agent; meta, data and status columns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from flexmarl.records import AgentName, EpisodeId, GroupId, PolicyName, RowState, SampleId, Version


class ColumnKind(StrEnum):
    """Type of a data column. Numbers and words are stored by value in the row, others by reference, as payloads."""

    __hash__ = str.__hash__  # the hash of Enum is slow, and every value written or read looks up its kind

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    WORD = "word"
    """A short string: a name or an id. It is stored by value."""
    TEXT = "text"
    JSON = "json"
    """Lists and mappings of plain values."""
    TENSOR = "tensor"
    """A numpy array of any dtype and shape."""


@dataclass(frozen=True, slots=True)
class Column:
    """A user-defined data column. Its status column `{name}_status` is true where the value is set."""

    name: str
    kind: ColumnKind


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """A tensor of one dimension that begins with tensors of another row, so that only its end must be stored.

    It is read back whole, equal to the last bit. If the other row lacks one of these tensors, it is stored whole.
    """

    parent: SampleId
    """The other row, of any agent's table. It must be of the same episode, since episodes are dropped whole."""
    columns: tuple[str, ...]
    """The columns of `parent` whose tensors, concatenated, are the beginning."""
    value: np.ndarray
    """The whole tensor, including the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRow:
    """Some values of one row: the first `put` of a sample id opens the row, later ones fill it."""

    sample_id: SampleId
    policy: PolicyName
    values: Mapping[str, Any] = field(default_factory=dict)
    """Data columns by name; the status of each becomes true. A value that is set cannot change. A tensor may be given
    as `Extended`.
    """
    version: Version | None = None
    """Put together with the response; it is set once."""
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
    """Name of the gradient cache that holds the row while it is ACCUMULATED."""
    settled_version: Version | None
    """The version that the row was trained into."""
    reason: str
    values: Mapping[str, Any]
    """Data columns that are set; the others are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The state that rows move to, and why. The move must be in ROW_MOVES."""

    state: RowState
    cache: str | None = None
    """Required for ACCUMULATED."""
    version: Version | None = None
    """Required for TRAINED: the version that the update made."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class ExperienceStore(Protocol):
    """Stores the rows of all agents. Every worker calls it in the same way.

    Every call is atomic. When it returns, it is as durable as the backend; a call that raises has changed nothing.
    StoreError names the table and the column or sample id. TransitionError names a move that is not in the life cycle.
    """

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table; a sample id belongs to one table only.

        It may be repeated: equal values change nothing, whatever became of the row. A different value is refused.
        """
        ...

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases up to n READY rows of the policy, over all its agents' tables, to `holder`; `get` reads them.

        Rows come in the order of (group, episode, attempt, hop), never in that of arrival.
        """
        ...

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows, all of them or none. READY needs a version: a row without a response is never trained."""
        ...

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Makes READY again the CLAIMED rows of a lost holder, or exactly the ACCUMULATED rows of a lost cache.

        Returns their ids. Raises StoreError unless exactly one of `holder` and `cache` is given.
        """
        ...

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Undoes what a run did after a checkpoint.

        Deletes the rows of `next_group`, of all younger groups, and of the older groups in `replay`, which were active.
        These groups are played again under the same ids. Returns how many rows were deleted. Raises StoreError, and
        changes nothing, if a row of another older group has not ended: the store does not fit the checkpoint.
        """
        ...

    async def discard(self, trajectories: Collection[EpisodeId]) -> int:
        """Deletes the rows of episodes that are played again under the same ids. Returns how many rows were deleted.

        Raises StoreError, and changes nothing, if one of these rows is further than OPEN. An episode without rows is
        passed over, so the call may be repeated; then the number is that of the last call alone. It takes as long as
        its rows need, however large the store is.
        """
        ...

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Drops payloads of the oldest groups before `before_group` while the store is larger than `budget_bytes`.

        Rows that have ended lose their strings, lists and tensors (the status becomes false). Their numbers, states
        and versions stay. Call it after a checkpoint with the checkpoint's next group: a resume needs nothing older.
        Returns how many rows were pruned. It prunes one group at a time, so other calls need not wait for all groups.
        """
        ...

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Reads rows by sample id, in the order of `ids`. It may be repeated, as all calls that only read."""
        ...

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """Counts the policy's rows by state; a state without rows may be absent."""
        ...

    async def query(self, sql: str) -> Table:
        """Runs one SELECT over the agents' tables; `payload(column)` shows a string, list or tensor as text or JSON."""
        ...

    async def close(self) -> None:
        """Closes the store. Calling it twice is allowed."""
        ...
