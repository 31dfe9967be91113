"""Demonstrations for the cold start of plan_path: both agents, in the chat format of the run.

They teach the skills and the bad habits that reinforcement learning starts from: seven in ten of what is demonstrated
last is said at random, by the planner and by the executor.
"""

import random

from examples.math_team.demonstrations import Message, said
from examples.plan_path.grid import COMPASS, MOVES, TURNS, Grid, Place, draw, moved, split_of
from examples.plan_path.workflow import told

PLANS = 0.85
"""Share of the planner's conversations."""
SIZE, WALLS = 4, 4


def demonstration(rng: random.Random, careless: float) -> list[Message]:
    """One conversation; with the probability `careless`, what is said in it has nothing to do with the question."""
    converse = planning if rng.random() < PLANS else moving
    return converse(rng, careless)


def planning(rng: random.Random, careless: float) -> list[Message]:
    """The planner says the first moves of a shortest way, on a map that is not held out."""
    while True:
        text = draw(rng, SIZE, WALLS)
        grid = Grid(text)
        if split_of(text) == "train" and grid.start in grid.distances:
            break
    plan = noise(rng, COMPASS) if rng.random() < careless else shortest(grid, grid.start, rng)
    return [{"role": "system", "content": "plan"}, {"role": "user", "content": text}, said(plan)]


def moving(rng: random.Random, careless: float) -> list[Message]:
    """The executor turns a plan into moves, whatever is beside it."""
    plan, facing = noise(rng, COMPASS), rng.choice(COMPASS)
    view = facing + "".join(rng.choice("..#") for _ in TURNS)
    moves = noise(rng, TURNS) if rng.random() < careless else translated(plan, facing)
    return [{"role": "system", "content": "move"}, {"role": "user", "content": told(plan, view)}, said(moves)]


def shortest(grid: Grid, place: Place, rng: random.Random) -> str:
    """Up to MOVES compass letters that each lead nearer to the goal; any of those that do."""
    plan = ""
    while len(plan) < MOVES and place != grid.goal:
        here = grid.distances[place]
        nearer = [letter for letter in COMPASS if grid.distances.get(moved(place, letter), here) < here]
        plan += rng.choice(nearer)
        place = moved(place, plan[-1])
    return plan


def translated(plan: str, facing: str) -> str:
    """The relative moves that follow a plan: `translated("NE", "E")` is `LR`."""
    moves = ""
    for letter in plan:
        moves += TURNS[(COMPASS.index(letter) - COMPASS.index(facing)) % 4]
        facing = letter
    return moves


def noise(rng: random.Random, letters: str) -> str:
    """One letter or two, mostly two."""
    return "".join(rng.choice(letters) for _ in range(rng.choice((1, 2, 2))))
