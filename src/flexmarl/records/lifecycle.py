"""The life cycles of rows and groups as tables of moves. A move that is not in its table is an error.

row    OPEN -> READY -> CLAIMED -> ACCUMULATED -> TRAINED
       -> FILTERED from OPEN; from READY and ACCUMULATED, if rows are trained before their group is complete and the
       group is then dropped
group  WAITING -> RUNNING -> DONE -> TRAINED
"""

from collections.abc import Mapping
from enum import StrEnum


class RowState(StrEnum):
    """State of one row on its way into an update."""

    OPEN = "open"
    """Being filled: prompt, response and reward arrive one by one."""
    READY = "ready"
    """Has its advantage; its policy's trainer may claim it."""
    CLAIMED = "claimed"
    """Leased to a trainer."""
    ACCUMULATED = "accumulated"
    """Added to a named gradient cache that is not yet applied; the paper's `is_processing`."""
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"


ROW_MOVES: Mapping[RowState, frozenset[RowState]] = {
    RowState.OPEN: frozenset({RowState.READY, RowState.FILTERED, RowState.FAILED, RowState.EXPIRED}),
    RowState.READY: frozenset({RowState.CLAIMED, RowState.FILTERED, RowState.EXPIRED}),
    RowState.CLAIMED: frozenset({RowState.READY, RowState.ACCUMULATED, RowState.EXPIRED}),
    RowState.ACCUMULATED: frozenset({RowState.READY, RowState.TRAINED, RowState.FILTERED}),
    RowState.TRAINED: frozenset(),
    RowState.FILTERED: frozenset(),
    RowState.FAILED: frozenset(),
    RowState.EXPIRED: frozenset(),
}
ROW_TERMINAL = frozenset(state for state, moves in ROW_MOVES.items() if not moves)


class GroupState(StrEnum):
    """State of one group from its admission to its single end."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    """All its episodes have ended."""
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    EXPIRED = "expired"


class FilterReason(StrEnum):
    """Why a group ended FILTERED."""

    TOO_EASY = "too_easy"
    """Every reward is the best one."""
    TOO_HARD = "too_hard"
    """Every reward is the worst one."""
    FLAT = "flat"
    """The rewards do not differ, and are neither all the best nor all the worst."""
    NO_WEIGHT = "no_weight"
    """No row has an advantage that trains anything."""
    NO_TRAINED_TURN = "no_trained_turn"
    """No turn is of a trained policy."""
    NO_BASELINE = "no_baseline"
    """The greedy play, which the others are compared with, failed."""


NO_SPREAD = (FilterReason.TOO_EASY, FilterReason.TOO_HARD, FilterReason.FLAT)
"""Reasons of groups whose rewards do not differ."""


GROUP_MOVES: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.WAITING: frozenset({GroupState.RUNNING, GroupState.EXPIRED}),
    GroupState.RUNNING: frozenset({GroupState.DONE, GroupState.WAITING, GroupState.FAILED, GroupState.EXPIRED}),
    GroupState.DONE: frozenset({GroupState.TRAINED, GroupState.FILTERED, GroupState.FAILED, GroupState.EXPIRED}),
    GroupState.TRAINED: frozenset(),
    GroupState.FILTERED: frozenset(),
    GroupState.FAILED: frozenset(),
    GroupState.EXPIRED: frozenset(),
}
GROUP_TERMINAL = frozenset(state for state, moves in GROUP_MOVES.items() if not moves)
