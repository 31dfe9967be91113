"""Tasks for the math team: products of one- to five-digit numbers and small expressions, each with its level.

Easy tasks (one-digit products) are knowledge of the seed model, hard ones (products of two- to five-digit numbers) need
the calculator, small expressions lie between. Which is which stands in `Task.data["level"]`; the agents are never told.
"""

import random
import zlib
from math import prod

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

LEVELS = ("easy", "expression", "hard")

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 fill the unit interval evenly, so that any run of tasks has the asked mix of levels."""


@task_generator("math_team")
def math_task(seed: int, index: int, split: Split, *, easy: float = 0.3, expression: float = 0.2) -> Task:
    """Task number `index` of a split: `easy` and `expression` are the shares of those levels, the rest is hard."""
    if min(easy, expression) < 0 or easy + expression > 1:
        raise ValueError(f"the shares easy={easy} and expression={expression} must be at least 0 and sum to at most 1")
    point = index * GOLDEN_RATIO % 1
    level = "easy" if point < easy else "expression" if point < easy + expression else "hard"
    rng = random.Random(f"{seed}/{split}/{index}")
    question = draw(rng, level)
    while split_of(question) != split:
        question = draw(rng, level)
    return Task(
        input_id=f"{split}-{seed}-{index}", prompt=question, reference=str(evaluate(question)), data={"level": level}
    )


def draw(rng: random.Random, level: str) -> str:
    """A random question of one level, e.g. `7*8`, `12+7*3` or `48213*907`."""
    if level == "easy":
        return f"{rng.randint(1, 9)}*{rng.randint(1, 9)}"
    if level == "expression":
        terms = [str(rng.randint(10, 99)), f"{rng.randint(2, 9)}*{rng.randint(2, 9)}"]
        return "+".join(rng.sample(terms, 2))
    return "*".join(str(rng.randint(10 ** (digits - 1), 10**digits - 1)) for digits in rng.choices(range(2, 6), k=2))


def split_of(question: str) -> Split:
    """The one split a question belongs to; a quarter is held out. The order of terms and factors does not matter."""
    terms = sorted("*".join(sorted(term.split("*"))) for term in question.split("+"))
    return "held_out" if zlib.crc32("+".join(terms).encode()) % 4 == 0 else "train"


def evaluate(question: str) -> int:
    """The value of a sum of products."""
    return sum(prod(map(int, term.split("*"))) for term in question.split("+"))
