"""Word problems of one sum, difference or product: with small numbers, or with large ones that need the calculator.

Which level a problem has stands in `Task.data["level"]`; the agents are never told.
"""

import random
import zlib

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

STORIES = {
    "+": (
        "{a} people came to the museum on Monday and {b} on Tuesday. How many came in all?",
        "A library owns {a} novels and {b} comics. How many books is that?",
        "Ada has driven {a} km and has {b} km to go. How long is her way?",
        "A farmer picked {a} apples and {b} pears. How many fruits did he pick?",
    ),
    "-": (
        "A hall has {a} seats, and {b} of them are taken. How many are free?",
        "A tank held {a} litres, and {b} litres leaked out. How many are left?",
        "Ben had {a} coins and spent {b} of them. How many has he now?",
        "Of {a} letters {b} have been answered. How many have not?",
    ),
    "*": (
        "A shop orders {a} boxes with {b} pens each. How many pens is that?",
        "A train has {a} cars with {b} seats each. How many seats does it have?",
        "Each of {a} hens laid {b} eggs. How many eggs are there?",
        "A wall has {a} rows of {b} bricks. How many bricks are in it?",
    ),
}
"""Problems by the operation that solves them."""

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 fill the unit interval evenly, so that any run of tasks has the asked mix of levels."""


@task_generator("real_team")
def word_problem(seed: int, index: int, split: Split, *, easy: float = 0.3) -> Task:
    """Problem number `index` of a split; `easy` is the share of those with numbers of one digit."""
    if not 0 <= easy <= 1:
        raise ValueError(f"easy={easy} is a share; give a number from 0 to 1")
    level = "easy" if index * GOLDEN_RATIO % 1 < easy else "hard"
    rng = random.Random(f"{seed}/{split}/{index}")
    problem, expression = draw(rng, level)
    while split_of(problem) != split:
        problem, expression = draw(rng, level)
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=problem,
        reference=str(value(expression)),
        data={"level": level, "expression": expression},
    )


def draw(rng: random.Random, level: str) -> tuple[str, str]:
    """A random problem of one level, and the expression that solves it, e.g. `38*126`."""
    operation = rng.choice(list(STORIES))
    if level == "easy":
        a, b = rng.randint(2, 9), rng.randint(2, 9)
    elif operation == "*":
        a, b = rng.randint(12, 99), rng.randint(102, 999)
    else:
        a, b = rng.randint(1002, 9999), rng.randint(102, 9999)
    if operation == "-":
        a, b = max(a, b), min(a, b)
    elif rng.random() < 0.5:
        a, b = b, a
    return rng.choice(STORIES[operation]).format(a=a, b=b), f"{a}{operation}{b}"


def split_of(problem: str) -> Split:
    """The one split that a problem belongs to; a quarter of them are held out."""
    return "held_out" if zlib.crc32(problem.encode()) % 4 == 0 else "train"


def value(expression: str) -> int:
    """The value of a sum, difference or product of two numbers.

    >>> value("38*126"), value("912-348")
    (4788, 564)
    """
    operation = next(sign for sign in STORIES if sign in expression)
    a, b = map(int, expression.split(operation))
    return {"+": a + b, "-": a - b, "*": a * b}[operation]
