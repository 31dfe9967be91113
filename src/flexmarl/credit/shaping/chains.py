"""Decides which turns form a chain, and which were before a turn, for terms that compare it with them."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import given, turn_of
from flexmarl.records import SampleId

Scope = Literal["agent", "team"]
"""Whose turns form a chain: an agent's own of an episode, or all of an episode, as in a debate."""


class Before(NamedTuple):
    """What a turn is compared with."""

    mean: float | None
    """Of the outcomes of the turns before it; None for a first turn."""
    last: float
    """Outcome of the chain's last turn."""


def compared(rows: Sequence[CreditRow], scope: Scope) -> Mapping[SampleId, Before]:
    """For each row, its chain. A turn's outcome is the mean over its calls; turns of one number are at once."""
    found: dict[SampleId, Before] = {}
    for chain in chains_of(rows, scope):
        turns: dict[tuple[int, str], list[float]] = {}
        for row in chain:
            turns.setdefault((turn_of(row), row.agent), []).append(given(row))
        outcomes = [(turn, _mean(calls)) for (turn, _), calls in sorted(turns.items())]
        last = _mean([outcome for turn, outcome in outcomes if turn == outcomes[-1][0]])
        for row in chain:
            before = [outcome for turn, outcome in outcomes if turn < turn_of(row)]
            found[row.sample_id] = Before(_mean(before) if before else None, last)
    return found


def chains_of(rows: Sequence[CreditRow], scope: Scope) -> list[list[CreditRow]]:
    """The rows of each chain, in their order."""
    chains: dict[tuple[str, str], list[CreditRow]] = {}
    for row in rows:
        chains.setdefault((row.episode, row.agent if scope == "agent" else ""), []).append(row)
    return list(chains.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
