"""Word problems of one sum, difference or product: with small numbers, or with large ones that need the calculator.

Which level a problem has stands in `Task.data["level"]`; the agents are never told.
"""

import random
import zlib

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

STORIES = {
    "+": (
        "{a} guests came on Monday and {b} on Tuesday. How many came in all?",
        "A library owns {a} novels and {b} comics. How many books in total?",
        "Ada picked {a} apples and {b} pears. How many fruits altogether?",
    ),
    "-": (
        "A hall has {a} seats, {b} are taken. How many are left?",
        "A tank held {a} litres and lost {b} litres. How many remain?",
        "Ben had {a} coins and spent {b}. How many has he left?",
    ),
    "*": (
        "A shop has {a} boxes of {b} pens each. How many pens?",
        "A train has {a} cars with {b} seats each. How many seats?",
        "Each of {a} farms has {b} hens. How many hens?",
    ),
}
"""Problems by the operation that solves them."""

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 fill the unit interval evenly, so that any run of tasks has the asked mix of levels."""


@task_generator("real_team")
def word_problem(seed: int, index: int, split: Split, *, easy: float = 0.25) -> Task:
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
        a, b = rng.randint(102, 999), rng.randint(102, 999)
    if operation == "-":
        a, b = max(a, b), min(a, b)
    return rng.choice(STORIES[operation]).format(a=a, b=b), f"{a}{operation}{b}"


def split_of(problem: str) -> Split:
    """The one split that a problem belongs to; a quarter of them are held out."""
    return "held_out" if zlib.crc32(problem.encode()) % 4 == 0 else "train"


def operation_of(expression: str) -> str:
    """The operation of a sum, difference or product of two numbers.

    >>> operation_of("38*126")
    '*'
    """
    return next(sign for sign in STORIES if sign in expression)


def value(expression: str) -> int:
    """The value of a sum, difference or product of two numbers.

    >>> value("38*126"), value("912-348")
    (4788, 564)
    """
    operation = operation_of(expression)
    a, b = map(int, expression.split(operation))
    return {"+": a + b, "-": a - b, "*": a * b}[operation]
