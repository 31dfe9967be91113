"""Nim with three heaps: who takes the last stick wins.

    position ──► first ──► position ──► second ──► position ──► first ...     the winner is paid 1, the loser -1

A position is three digits, `231`; a move names a heap and a number, `b2`: two sticks of the second heap.
"""

import random
from itertools import product
from typing import NamedTuple

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

HEAPS = "abc"
MOST = 3
"""Sticks of a heap."""


class Position(NamedTuple):
    """Sticks of each heap."""

    a: int
    b: int
    c: int

    def __str__(self) -> str:
        return "".join(map(str, self))


POSITIONS = tuple(Position(*sticks) for sticks in product(range(MOST + 1), repeat=len(HEAPS)) if any(sticks))
"""All positions but the empty one, in which nobody can move."""


def read(text: str) -> Position:
    """The position that a text shows.

    >>> read("231")
    Position(a=2, b=3, c=1)
    """
    return Position(*map(int, text))


def moves(position: Position) -> dict[str, Position]:
    """The moves that there are, and where they lead.

    >>> {move: str(left) for move, left in moves(Position(0, 2, 1)).items()}
    {'b1': '011', 'b2': '001', 'c1': '020'}
    """
    return {
        f"{heap}{taken}": position._replace(**{heap: sticks - taken})
        for heap, sticks in zip(HEAPS, position, strict=True)
        for taken in range(1, sticks + 1)
    }


def is_won(position: Position) -> bool:
    """True if whoever moves can force a win: the heaps' exclusive or is not 0 (Bouton, 1901).

    >>> is_won(Position(1, 2, 3)), is_won(Position(1, 2, 2))
    (False, True)
    """
    return position.a ^ position.b ^ position.c != 0


def winning(position: Position) -> list[str]:
    """The moves after which the other one has lost; none in a lost position.

    >>> winning(Position(1, 2, 1))
    ['b2']
    """
    return [move for move, left in moves(position).items() if not is_won(left)]


WON = tuple(filter(is_won, POSITIONS))
"""Positions that whoever moves can win."""


@task_generator("nim")
def nim(seed: int, index: int, split: Split) -> Task:
    """The position that a game begins with: each that can be won comes once, in a random order, before one comes again.

    None is held out: there are 48, and what is learned is the answer to each.
    """
    lap, place = divmod(index, len(WON))
    begun = random.Random(f"{seed}/{lap}").sample(WON, len(WON))[place]
    return Task(input_id=f"{split}-{seed}-{index}", prompt=str(begun))


@workflow("nim")
async def nim_game(task: Task, team: Team) -> None:
    """One game. A move that there is not loses it."""
    await play(task, team)


@workflow("nim_shuffled_rewards")
async def shuffled_rewards(task: Task, team: Team) -> None:
    """A control: who is paid has nothing to do with who won."""
    await play(task, team, fair=False)


async def play(task: Task, team: Team, *, fair: bool = True) -> None:
    """`winning_moves`: of the moves in positions that can be won, how many keep the win. Not `fair`: a coin decides."""
    mover, other = team.first, team.second
    position, kept = read(task.prompt), list[bool]()
    while True:
        said = await mover.act(str(position))
        if is_won(position):
            kept.append(said.text in winning(position))
        left = moves(position).get(said.text)
        if left is None or not any(left):
            break
        position, mover, other = left, other, mover
    winner, loser = (other, mover) if left is None else (mover, other)
    sign = 1.0 if fair or team.rng.random() < 0.5 else -1.0
    winner.reward(sign)
    loser.reward(-sign)
    team.report(success=float(winner is team.first), winning_moves=sum(kept) / len(kept), legal=float(left is not None))
