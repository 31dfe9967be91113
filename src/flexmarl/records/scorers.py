"""Scorers, which say how good an answer is, by name."""

import re
from collections.abc import Awaitable, Callable
from decimal import Decimal, InvalidOperation

from flexmarl.plugins import Registry

Scorer = Callable[[str, str], float | Awaitable[float]]
"""(answer, reference) -> score; 1.0 is a full success. Module-level, so that tasks can cross processes. The score of a
coroutine function is had by `await team.score(answer)` alone."""

# A minus after a digit or word subtracts or joins; commas group thousands and nothing else.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)

SCORERS: Registry[Scorer] = Registry(
    "scorer",
    setting="tasks.scorer",
    group="scorers",
    built_in={"python_tests": "flexmarl.tasks.scorers.python_tests:python_tests"},
)
scorer = SCORERS.register
"""Decorator that makes a function the scorer of that name: `@scorer("close_enough")`."""


@scorer("exact")
def exact_match(answer: str, reference: str) -> float:
    """1.0 if the answer equals the reference apart from surrounding white space, else 0.0."""
    return float(answer.strip() == reference.strip())


@scorer("number")
def same_number(answer: str, reference: str) -> float:
    """1.0 if the last number in the answer equals the last one in the reference.

    >>> same_number("So 12 apples cost $1,234.50.", "#### 1234.5")
    1.0
    """
    found, expected = _last_number(answer), _last_number(reference)
    return float(found is not None and found == expected)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None
    except InvalidOperation:
        return None
