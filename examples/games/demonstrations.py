"""Demonstrations for the cold start of the games: the form of moves, and for Nim a hint of which ones are good.

A demonstrated move of Nim wins in 35% of the positions that can be won, and else is drawn from all that there are. In
poker each view is answered by a bet as often as by a pass.
"""

import random

from examples.cold_start import Message
from examples.games.kuhn import BET, PASS, VIEWS
from examples.games.nim import POSITIONS, Position, moves, winning

HINT = 0.35
"""Share of winning moves whatever is drawn."""


def demonstration(rng: random.Random) -> list[Message]:
    """One move, of either game."""
    if rng.random() < 0.2:
        return said("kuhn", rng.choice(VIEWS), rng.choice((BET, PASS)))
    position = rng.choice(POSITIONS)
    return said("nim", str(position), chosen(rng, position))


def chosen(rng: random.Random, position: Position) -> str:
    """The move that is demonstrated in a position of Nim."""
    good = winning(position)
    return rng.choice(good if good and rng.random() < HINT else list(moves(position)))


def said(game: str, heard: str, answer: str) -> list[Message]:
    """A conversation of one answer."""
    return [
        {"role": "system", "content": game},
        {"role": "user", "content": heard},
        {"role": "assistant", "content": answer},
    ]
