"""Decides which moves a row may make, which values may be set, and whose turn comes first.

    OPEN -> READY -> CLAIMED (a holder's) -> ACCUMULATED (in a gradient cache) -> TRAINED (into a version)

The table of moves is `records.lifecycle`. Only `claim` makes a row CLAIMED; `settle` makes every other move.
"""

import re
import reprlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexmarl.errors import StoreError, TransitionError
from flexmarl.experience.interface import Extended, Outcome
from flexmarl.experience.schema import Stored
from flexmarl.records import ROW_MOVES, ROW_TERMINAL, AgentName, GroupId, PolicyName, RowState, SampleId, Version

_SAMPLE_ID = re.compile(r"[^\0]*_(\d+)_g(\d+)e(\d+)a(\d+)", re.ASCII)
"""As `records.split_sample_id` and `split_trajectory_id` read it, in one go: every row that opens is read so."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row is in its life, and who has it there."""

    state: RowState
    holder: str | None = None
    """While CLAIMED."""
    cache: str | None = None
    """While ACCUMULATED."""
    settled_version: Version | None = None
    """Once TRAINED."""
    reason: str = ""


class ClaimOrder(NamedTuple):
    """Place of a sample among all others: rows are claimed in this order, never in that of arrival."""

    group_id: int
    episode_index: int
    attempt: int
    hop: int


def claim_order(sample_id: SampleId) -> ClaimOrder:
    """The place that a sample's id gives it.

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
    """The values of `given` that are not there yet; StoreError if one is there and differs."""
    for column in there.keys() & given.keys():
        if there[column] != given[column]:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} is {reprlib.repr(there[column])} and cannot become "
                f"{reprlib.repr(given[column])}; a value is set once, a new play has a new sample id"
            )
    return {column: value for column, value in given.items() if column not in there}


def check_extended(table: str, extended: Mapping[tuple[SampleId, str], Extended]) -> None:
    """Checks that each tensor begins with values of its own group: groups are dropped as a whole."""
    for (sample_id, column), value in extended.items():
        if value.value.ndim != 1 or not value.columns:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} has shape {value.value.shape} and begins with columns "
                f"{value.columns}; only a tensor of one dimension can begin with one or more columns of another row"
            )
        if claim_order(value.parent).group_id != claim_order(sample_id).group_id:
            raise StoreError(
                f"table {table!r}, row {sample_id!r}: {column} begins with values of row {value.parent!r}, which is "
                f"of another group; give it whole"
            )


def check_begins(table: str, sample_id: SampleId, column: str, extended: Extended, beginning: np.ndarray) -> None:
    """Checks, bit by bit, that a tensor begins with what it was said to begin with."""
    value = extended.value
    same = beginning.dtype == value.dtype and beginning.ndim == 1 and len(beginning) <= len(value)
    if not same or beginning.tobytes() != value[: len(beginning)].tobytes():
        raise StoreError(
            f"table {table!r}, row {sample_id!r}: {column} was said to begin with {' and '.join(extended.columns)} of "
            f"row {extended.parent!r}, and does not; give it whole"
        )


def check_outcome(outcome: Outcome) -> None:
    """Checks that an outcome names what its state needs, and nothing else."""
    state = outcome.state
    if state is RowState.CLAIMED:
        raise TransitionError("rows are not settled as claimed: call claim(policy, n, holder=...)")
    if (outcome.cache is not None) != (state is RowState.ACCUMULATED):
        raise StoreError(f"outcome {state}: cache is {outcome.cache!r}; accumulated rows need one, others have none")
    if (outcome.version is not None) != (state is RowState.TRAINED):
        raise StoreError(f"outcome {state}: version is {outcome.version!r}; trained rows need one, others have none")


def check_move(table: str, sample_id: SampleId, state: RowState, version: Version | None, outcome: Outcome) -> None:
    """Checks one row's move; a row without a version has no response, so it cannot become READY (law 11)."""
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
    """Refuses ids of rows that no table has."""
    unknown = [sample_id for sample_id in ids if sample_id not in known]
    if unknown:
        raise StoreError(f"no table has row {unknown[0]!r} ({len(unknown)} of {len(ids)} ids are unknown)")


def check_owner(table: AgentName, sample_id: SampleId, owner: str) -> None:
    """Checks that the table that has the row already is this one: an id is in one table only."""
    if owner != table:
        raise StoreError(f"table {table!r}: row {sample_id!r} is in table {owner!r} already")


def check_claim(policy: PolicyName, n: int) -> None:
    """Checks how many rows are asked for."""
    if n < 0:
        raise StoreError(f"claim of {n} rows of policy {policy!r}; n must be at least 0")


def check_released(holder: str | None, cache: str | None) -> None:
    """Checks that a release names who lost the rows, once."""
    if (holder is None) == (cache is None):
        raise StoreError(f"release takes a holder or a cache, got holder={holder!r} and cache={cache!r}")


def check_rewound(table: str, sample_id: SampleId, state: RowState, next_group: GroupId) -> None:
    """Checks a row that a rewind to this group leaves: in the checkpoint, it had ended."""
    if state not in ROW_TERMINAL:
        raise StoreError(
            f"table {table!r}, row {sample_id!r} is {state}, but groups before {next_group} have ended in the "
            f"checkpoint: the store is of another run, or has lost what came after it"
        )
