"""Tasks for the code team: three examples of a function of two digits, whose expression is to be found.

A question is `3,5:15;2,7:14;4,1:4`: two inputs and the result, three times. Exactly one expression of the language fits
all three. Hidden tests, on other inputs, score an answer in a box; the agents see neither them nor the language.
"""

import random
import zlib
from collections.abc import Callable, Mapping

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator
from flexmarl.tasks.scorers.python_tests import reference_of

LANGUAGE: Mapping[str, Callable[[int, int], int]] = {
    "a+b": lambda a, b: a + b,
    "a-b": lambda a, b: a - b,
    "a*b": lambda a, b: a * b,
    "max(a,b)": max,
    "min(a,b)": min,
}
"""Expressions that a function may be, and what they compute."""
EXAMPLES = 3
HIDDEN = 6
"""Hidden tests of a task."""
FUNCTION = "f"

Example = tuple[int, int, int]
"""Two inputs and the result."""


@task_generator("code_team")
def code_task(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"{seed}/{split}/{index}")
    examples = draw(rng)
    while split_of(question_of(examples)) != split:
        examples = draw(rng)
    compute = LANGUAGE[meaning(examples)]
    inputs = rng.sample([(a, b) for a in range(1, 10) for b in range(1, 10) if a != b], HIDDEN)
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=question_of(examples),
        reference=reference_of(FUNCTION, [((a, b), compute(a, b)) for a, b in inputs], timeout_s=30.0),
        scorer="python_tests",
        data={"examples": examples},
    )


def draw(rng: random.Random) -> list[Example]:
    """Random examples that exactly one expression fits; all expressions are equally likely."""
    compute = rng.choice(list(LANGUAGE.values()))
    while True:
        inputs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(EXAMPLES)]
        examples = [(a, b, compute(a, b)) for a, b in inputs]
        if len(fitting(examples)) == 1:
            return examples


def fitting(examples: list[Example]) -> list[str]:
    """The expressions that fit all examples."""
    return [text for text, compute in LANGUAGE.items() if all(compute(a, b) == c for a, b, c in examples)]


def meaning(examples: list[Example]) -> str:
    """The expression that the examples stand for.

    >>> meaning([(3, 5, 15), (2, 7, 14), (4, 1, 4)])
    'a*b'
    """
    (only,) = fitting(examples)
    return only


def question_of(examples: list[Example]) -> str:
    """The examples as agents read them.

    >>> question_of([(3, 5, 15), (2, 7, 14), (4, 1, 4)])
    '3,5:15;2,7:14;4,1:4'
    """
    return ";".join(f"{a},{b}:{c}" for a, b, c in examples)


def examples_of(question: str) -> list[Example]:
    """The examples of a question."""
    parts = (one.replace(":", ",").split(",") for one in question.split(";"))
    return [(int(a), int(b), int(c)) for a, b, c in parts]


def split_of(question: str) -> Split:
    """The one split a question belongs to; about a quarter is held out."""
    return "held_out" if zlib.crc32(question.encode()) % 4 == 0 else "train"
