"""Table of functions that users write and a config names; the scorers, which say how good an answer is."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Generic, TypeVar

from flexmarl.errors import ConfigError
from flexmarl.records import exact_match

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions of one kind by name; filled by a decorator when the user's files are imported."""

    def __init__(self, kind: str, *, setting: str) -> None:
        """`setting`: the config key that names a function, for error messages."""
        self._kind = kind
        self._setting = setting
        self._table: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[G], G]:
        """Decorator that registers a function. Two functions cannot share a name; one file may be imported twice."""

        def add(function: G) -> G:
            registered = self._table.get(name, function)
            if registered is not function and _place(registered) != _place(function):
                raise ConfigError(f"two {self._kind}s are called '{name}': {_place(registered)} and {_place(function)}")
            self._table[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        """The function of that name. Raises ConfigError with the nearest name and all known names."""
        if name not in self._table:
            near = difflib.get_close_matches(name, self._table, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            known = ", ".join(self) or "none; list the file that has it under `code`"
            raise ConfigError(f"{self._setting}: there is no {self._kind} '{name}'; {hint}there are: {known}")
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        return iter(sorted(self._table))


def _place(function: Callable[..., Any]) -> str:
    """File and line of a function; for a class, those of its first method."""
    methods = vars(function).values() if inspect.isclass(function) else [inspect.unwrap(function)]
    code = next((method.__code__ for method in methods if inspect.isfunction(method)), None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


Scorer = Callable[[str, str], float]
"""(answer, reference) -> score; 1.0 is a full success. Module-level, so that tasks can cross processes."""

# A minus after a digit or word subtracts or joins; commas group thousands and nothing else.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)

SCORERS: Registry[Scorer] = Registry("scorer", setting="tasks.scorer")
scorer = SCORERS.register
"""Decorator that makes a function the scorer of that name: `@scorer("close_enough")`."""

scorer("exact")(exact_match)


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
