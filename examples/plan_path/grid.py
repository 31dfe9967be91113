"""Environment on a grid with walls, and tasks that are drawn on it.

    ..#.       A  the executor         N
    .A#G       G  the goal           W   E
    ....       #  a wall               S
    .#..

The planner sees this map. The executor sees which way it faces and what is beside it: ahead, right, behind, left. Its
moves are relative to where it faces, which only it knows; a move turns it. So the planner's compass words must be
translated, and neither gets anywhere alone.

    worth of a place = 1 at the goal - moves from there to the goal
    reward of a round = worth of the place after it - before it - 0.5 for each bump into a wall

Worth is a potential and nothing is discounted, so over a play the rewards add up to what was gained from its start to
its end, whatever the detours, less the bumps: loitering pays nothing (README, "Loitering").
"""

import random
import zlib
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.tasks import Split, StepResult, environment, task_generator

Place = tuple[int, int]
"""Row and column; (0, 0) is in the north-west."""

COMPASS = "NESW"
STEPS: dict[str, Place] = {"N": (-1, 0), "E": (0, 1), "S": (1, 0), "W": (0, -1)}
TURNS = "FRBL"
"""Forward, right, back, left: how many quarter turns to the right, by index."""
MOVES = 2
"""Moves in one round at most."""
ROUNDS = 4
"""Rounds of one play at most."""
ARRIVAL = 1.0
"""What the goal is worth beyond its distance of 0."""
BUMP = 0.5
"""A reward that is lost."""


@dataclass(frozen=True, slots=True)
class Play:
    """The whole state of a play; a snapshot of it."""

    place: Place
    facing: str
    """A letter of COMPASS."""
    round: int


class Grid:
    """A map: where one can go, and how far it is from there to the goal."""

    def __init__(self, text: str) -> None:
        """`text`: rows joined by `/`."""
        self.rows = text.split("/")
        cells = {(r, c): cell for r, row in enumerate(self.rows) for c, cell in enumerate(row)}
        self.start = next(place for place, cell in cells.items() if cell == "A")
        self.goal = next(place for place, cell in cells.items() if cell == "G")
        self.free = frozenset(place for place, cell in cells.items() if cell != "#")
        self.distances = self._distances()

    def _distances(self) -> dict[Place, int]:
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            place = queue.popleft()
            for direction in COMPASS:
                beside = moved(place, direction)
                if beside in self.free and beside not in found:
                    found[beside] = found[place] + 1
                    queue.append(beside)
        return found

    def drawn(self, executor: Place) -> str:
        """The map with the executor at this place."""
        return "/".join(
            "".join(self._cell((r, c), executor) for c in range(len(row))) for r, row in enumerate(self.rows)
        )

    def _cell(self, place: Place, executor: Place) -> str:
        if place == executor:
            return "A"
        return "#" if place not in self.free else "G" if place == self.goal else "."

    def follow(self, place: Place, directions: str) -> tuple[Place, int]:
        """(where these compass letters lead, how many of them run into a wall); ends at the goal."""
        walls = 0
        for direction in directions:
            beside = moved(place, direction)
            walls += beside not in self.free
            place = beside if beside in self.free else place
            if place == self.goal:
                break
        return place, walls

    def worth(self, place: Place) -> float:
        """The potential that rewards are differences of."""
        return ARRIVAL * (place == self.goal) - self.distances[place]


@lru_cache(maxsize=4096)
def grid(text: str) -> Grid:
    """The map of a task; its episodes share it."""
    return Grid(text)


def moved(place: Place, direction: str) -> Place:
    """One cell on."""
    down, right = STEPS[direction]
    return place[0] + down, place[1] + right


def understood(words: str, letters: str) -> bool:
    """Whether words are moves, one to MOVES of them."""
    return 1 <= len(words) <= MOVES and set(words) <= set(letters)


def turned(facing: str, turn: str) -> str:
    """The compass letter of a relative one: `turned("E", "R")` is `S`."""
    return COMPASS[(COMPASS.index(facing) + TURNS.index(turn)) % 4]


def absolute(turns: str, facing: str) -> str:
    """The compass letters of relative moves: `absolute("LR", "E")` is `NE`."""
    directions = ""
    for turn in turns:
        facing = turned(facing, turn)
        directions += facing
    return directions


@environment("plan_path")
class PlanPath:
    """One play on the map of a task. The seed decides which way the executor faces at first."""

    def __init__(self, task: Task) -> None:
        self.grid = grid(task.prompt)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """At the start."""
        self._play = Play(self.grid.start, random.Random(seed).choice(COMPASS), 0)

    def map(self) -> str:
        """What the planner sees."""
        return self.grid.drawn(self._play.place)

    def observe(self) -> str:
        """What the executor sees: which way it faces, then what is ahead, right, behind and left of it."""
        beside = (moved(self._play.place, turned(self._play.facing, turn)) for turn in TURNS)
        return self._play.facing + "".join("." if place in self.grid.free else "#" for place in beside)

    def step(self, action: str) -> StepResult:
        """Plays one round: up to two letters of FRBL. Anything else counts as a bump."""
        if self._over:
            raise EpisodeError("the play is over; reset or restore the environment")
        play = self._play
        place, facing, bumps = play.place, play.facing, 0
        if understood(action, TURNS):
            directions = absolute(action, facing)
            place, bumps = self.grid.follow(place, directions)
            facing = directions[-1]
        else:
            bumps = 1
        self._play = Play(place, facing, play.round + 1)
        return StepResult(self.grid.worth(place) - self.grid.worth(play.place) - BUMP * bumps, self._over)

    def promise(self, plan: str) -> tuple[float, Place, int]:
        """(what a plan would gain if it were followed, where it leads, how many walls are in its way).

        What is no plan leads nowhere, as if it ran into a wall.
        """
        if not understood(plan, COMPASS):
            return 0.0, self.place, 1
        place, walls = self.grid.follow(self.place, plan)
        return self.grid.worth(place) - self.grid.worth(self.place), place, walls

    def snapshot(self) -> Play:
        """The state is one frozen record."""
        return self._play

    def restore(self, snapshot: Play) -> None:
        """Takes it as it is."""
        self._play = snapshot

    @property
    def place(self) -> Place:
        """Where the executor is."""
        return self._play.place

    @property
    def distance(self) -> int:
        """Moves to the goal at least."""
        return self.grid.distances[self._play.place]

    @property
    def arrived(self) -> bool:
        """Whether the executor is at the goal."""
        return self._play.place == self.grid.goal

    @property
    def _over(self) -> bool:
        return self.arrived or self._play.round == ROUNDS


@task_generator("plan_path")
def plan_path_task(
    seed: int, index: int, split: Split, *, size: int = 4, walls: int = 4, nearest: int = 3, farthest: int = 6
) -> Task:
    """Map number `index` of a split; the goal is `nearest` to `farthest` moves away."""
    rng = random.Random(f"{seed}/{split}/{index}")
    text = draw(rng, size, walls)
    while split_of(text) != split or not nearest <= grid_distance(text) <= farthest:
        text = draw(rng, size, walls)
    return Task(input_id=f"{split}-{seed}-{index}", prompt=text, data={"distance": grid_distance(text)})


def draw(rng: random.Random, size: int, walls: int) -> str:
    """A random map."""
    cells = ["A", "G", *"#" * walls, *"." * (size * size - walls - 2)]
    rng.shuffle(cells)
    return "/".join("".join(cells[row * size : (row + 1) * size]) for row in range(size))


def grid_distance(text: str) -> int:
    """Moves from start to goal at least; 0 if there is no way."""
    found = Grid(text)
    return found.distances.get(found.start, 0)


def split_of(text: str) -> Split:
    """The one split that a map belongs to, wherever its executor is; a quarter is held out."""
    return "held_out" if zlib.crc32(text.replace("A", ".").encode()) % 4 == 0 else "train"
