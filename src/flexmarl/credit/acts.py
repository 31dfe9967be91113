"""Decides which rows are the calls of one act, and what they have in common when acts are compared.

An act is one `seat.act`: a call, and those that go on after a tool or a stop string. The later ones have prompts that
nobody shares, so that their own tags compare them with nobody:

    act 0   call 0   branch 0   context of the turn          act 3   call 3   branch 0   context of the turn
            call 1   branch 0:1 what the tool said                   call 4   branch 0:2 what the tool said
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit.interface import CreditRow
from flexmarl.records import EpisodeId, Scalar

OF_CONTEXT = ("branch", "context_hash")
"""Tags that say what a call was sampled from."""


def led(rows: Sequence[CreditRow]) -> list[CreditRow]:
    """The rows, each later call of an act with what its first call was sampled from, if that is among them."""
    first = {_act_of(row): row for row in rows if row.act == row.hop}
    found: list[CreditRow] = []
    for row in rows:
        lead = first.get(_act_of(row), row)
        tags = {name: lead.tags[name] for name in OF_CONTEXT if name in lead.tags}
        found.append(row if lead is row else replace(row, tags={**row.tags, **tags}))
    return found


def places_of_acts(rows: Sequence[CreditRow]) -> list[list[int]]:
    """For each act, in the order of first calls, the places of its calls among the rows."""
    places: dict[tuple[EpisodeId, Scalar], list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(_act_of(row), []).append(place)
    return list(places.values())


def means_of_acts(rows: Sequence[CreditRow], x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """(mean of x [N] over the calls of each act [K], number of its act for each row [N])."""
    acts = places_of_acts(rows)
    means = np.array([x[places[0]] if x[places].min() == x[places].max() else x[places].mean() for places in acts])
    numbers = np.zeros(len(rows), np.intp)
    for number, places in enumerate(acts):
        numbers[places] = number
    return means, numbers


def _act_of(row: CreditRow) -> tuple[EpisodeId, Scalar]:
    return row.episode, row.act
