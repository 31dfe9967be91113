"""Decides which moves a row may make, which values may be set, and which row is claimed first.

    OPEN -> READY -> CLAIMED (by a holder) -> ACCUMULATED (in a gradient cache) -> TRAINED (into a version)

The table of moves is in `records.lifecycle`. Only `claim` makes a row CLAIMED. `release` returns rows to READY, and
`settle` makes the other moves.
"""

import re
import reprlib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexmarl.errors import StoreError, TransitionError, boundary
from flexmarl.experience.interface import Extended, Outcome
from flexmarl.experience.schema import Stored
from flexmarl.records import (
    ROW_MOVES,
    ROW_TERMINAL,
    AgentName,
    EpisodeId,
    GroupId,
    PolicyName,
    RowState,
    SampleId,
    Version,
    split_trajectory_id,
)

_SAMPLE_ID = re.compile(r"[^\0]*_(\d+)_g(\d+)e(\d+)a(\d+)", re.ASCII)
"""Reads in one match what `records.split_sample_id` and `split_trajectory_id` read: every row that opens needs it."""


@dataclass(frozen=True, slots=True)
class RowStanding:
    """A row's state, and what holds the row in that state."""

    state: RowState
    holder: str | None = None
    """Set while CLAIMED."""
    cache: str | None = None
    """Set while ACCUMULATED."""
    settled_version: Version | None = None
    """Set when TRAINED."""
    reason: str = ""


class ClaimOrder(NamedTuple):
    """Sort key of a sample among all others: rows are claimed in this order, never in that of arrival."""

    group_id: int
    episode_index: int
    attempt: int
    hop: int


def claim_order(sample_id: SampleId) -> ClaimOrder:
    """Reads the sort key in a sample id. Raises StoreError for an id of another form.

    >>> claim_order("mul-7_2_g12e3a0")
    ClaimOrder(group_id=12, episode_index=3, attempt=0, hop=2)
    """
    match = _SAMPLE_ID.fullmatch(sample_id)
    if match is None:
        raise StoreError(
            f"sample id {sample_id!r} must be input, hop and trajectory, as in 'mul-7_2_g12e3a0', without NUL "
            f"characters; make_sample_id makes such ids"
        )
    hop, group, episode, attempt = match.groups()
    return ClaimOrder(int(group), int(episode), int(attempt), int(hop))


def set_once(
    table: str, sample_id: SampleId, there: Mapping[str, Stored], given: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The values of `given` that are not in `there`. Raises StoreError if a value is in both and differs."""
    for column in there.keys() & given.keys():
        if there[column] != given[column]:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} is {reprlib.repr(there[column])} and cannot become "
                f"{reprlib.repr(given[column])}; a value is set once, a new play has a new sample id"
            )
    return {column: value for column, value in given.items() if column not in there}


def check_extended(table: str, extended: Mapping[tuple[SampleId, str], Extended]) -> None:
    """Checks that each tensor has one dimension and begins with values of its own episode, which is dropped whole."""
    for (sample_id, column), value in extended.items():
        if value.value.ndim != 1 or not value.columns:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} has shape {value.value.shape} and begins with columns "
                f"{value.columns}; only a tensor of one dimension can begin with one or more columns of another row"
            )
        if claim_order(value.parent)[:3] != claim_order(sample_id)[:3]:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} begins with values of row {value.parent!r}, which is "
                f"of another episode; give it whole"
            )


def check_begins(table: str, sample_id: SampleId, column: str, extended: Extended, beginning: np.ndarray) -> None:
    """Checks, bit by bit, that the tensor in `extended` begins with `beginning`, the stored tensors that it names."""
    value = extended.value
    same = beginning.dtype == value.dtype and beginning.ndim == 1 and len(beginning) <= len(value)
    if not same or beginning.tobytes() != value[: len(beginning)].tobytes():
        raise StoreError(
            f"table {table!r}, row {sample_id!r}: {column} was said to begin with {' and '.join(extended.columns)} of "
            f"row {extended.parent!r}, and does not; give it whole"
        )


def check_outcome(outcome: Outcome) -> None:
    """Checks that an outcome is not CLAIMED, and names a cache exactly if ACCUMULATED, a version exactly if TRAINED."""
    state = outcome.state
    if state is RowState.CLAIMED:
        raise TransitionError("rows are not settled as claimed: call claim(policy, n, holder=...)")
    if (outcome.cache is not None) != (state is RowState.ACCUMULATED):
        raise StoreError(f"outcome {state}: cache is {outcome.cache!r}; accumulated rows need one, others have none")
    if (outcome.version is not None) != (state is RowState.TRAINED):
        raise StoreError(f"outcome {state}: version is {outcome.version!r}; trained rows need one, others have none")


def check_move(table: str, sample_id: SampleId, state: RowState, version: Version | None, outcome: Outcome) -> None:
    """Checks one row's move. A row without a version has no response, so it cannot become READY (law 11)."""
    moves = ROW_MOVES[state]
    if outcome.state not in moves:
        raise TransitionError(
            f"table {table!r}, row {sample_id!r} is {state} and cannot become {outcome.state}; "
            f"it may become {', '.join(sorted(moves)) or 'nothing else: it has ended'}"
        )
    if outcome.state is RowState.READY and version is None:
        raise TransitionError(
            f"table {table!r}, row {sample_id!r} has no policy version, so no response: it cannot become ready; "
            f"put the response first or settle it as failed"
        )


def check_known(ids: Sequence[SampleId], known: Container[SampleId]) -> None:
    """Raises StoreError for ids of rows that no table has."""
    unknown = [sample_id for sample_id in ids if sample_id not in known]
    if unknown:
        raise StoreError(f"no table has row {unknown[0]!r} ({len(unknown)} of {len(ids)} ids are unknown)")


def check_owner(table: AgentName, sample_id: SampleId, owner: str) -> None:
    """Checks that the row's present table, `owner`, is `table`: an id is in one table only."""
    if owner != table:
        raise StoreError(f"table {table!r}: row {sample_id!r} is in table {owner!r} already")


def check_claim(policy: PolicyName, n: int) -> None:
    """Checks that the number of rows to claim is not negative."""
    if n < 0:
        raise StoreError(f"claim of {n} rows of policy {policy!r}; n must be at least 0")


def check_released(holder: str | None, cache: str | None) -> None:
    """Checks that a release names a holder or a cache, and not both."""
    if (holder is None) == (cache is None):
        raise StoreError(f"release takes a holder or a cache, got holder={holder!r} and cache={cache!r}")


def check_rewound(table: str, sample_id: SampleId, state: RowState, next_group: GroupId) -> None:
    """Checks a row that a rewind to `next_group` keeps: it must have ended, as it had in the checkpoint."""
    if state not in ROW_TERMINAL:
        raise StoreError(
            f"table {table!r}, row {sample_id!r} is {state}, but groups before {next_group} have ended in the "
            f"checkpoint: the store is of another run, or has lost what came after it"
        )


def places_of(trajectories: Collection[EpisodeId]) -> frozenset[tuple[int, int, int]]:
    """The (group, episode, attempt) of the trajectories. Raises StoreError for an id of another form."""
    with boundary(StoreError, "discarding episodes"):
        return frozenset(split_trajectory_id(trajectory) for trajectory in trajectories)


def check_discarded(rows: Iterable[tuple[str, SampleId, RowState]]) -> None:
    """Checks that all these (table, sample id, state) are OPEN: later rows are settled, or part of an update."""
    later = [row for row in rows if row[2] is not RowState.OPEN]
    if later:
        table, sample_id, state = min(later, key=lambda row: (claim_order(row[1]), row[1]))
        raise StoreError(
            f"table {table!r}, row {sample_id!r} is {state}, so its episode has ended and cannot be discarded; only "
            f"episodes whose rows are all open can"
        )
