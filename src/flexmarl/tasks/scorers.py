"""Decides how good an answer is; tasks from files name their scorer."""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from flexmarl.errors import ConfigError
from flexmarl.records import exact_match

Scorer = Callable[[str, str], float]
"""(answer, reference) -> score; 1.0 is a full success. Module-level, so that tasks can cross processes."""

SCORERS: dict[str, Scorer] = {"exact": exact_match}

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


def scorer(name: str) -> Callable[[Scorer], Scorer]:
    """Decorator that makes a function the scorer `name`. A name is given once."""

    def register(function: Scorer) -> Scorer:
        if SCORERS.get(name, function) is not function:
            raise ConfigError(f"two scorers are called '{name}'; give one of them another name")
        SCORERS[name] = function
        return function

    return register


def find_scorer(name: str) -> Scorer:
    """The scorer of that name. Raises ConfigError with the names there are."""
    if name not in SCORERS:
        raise ConfigError(f"tasks.scorer: there is no '{name}'; use one of {', '.join(sorted(SCORERS))}")
    return SCORERS[name]


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
