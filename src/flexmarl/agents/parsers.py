"""Decides what an agent's final text says: one table of parsers, each text -> value, None where it says nothing."""

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from flexmarl.settings import Settings
from flexmarl.tasks.registry import Registry

Parser = Callable[[str], Any]

PARSERS: Registry[Parser] = Registry("parser", setting="parser")


def parser(name: str) -> Callable[[Parser], Parser]:
    """Decorator that puts a parser into the table."""
    return PARSERS.register(name)


class Choice(Settings):
    """The option that is said last, as a word of its own, whatever its case.

    >>> Choice(options=("approve", "reject"))("I cannot approve this. Reject!")
    'reject'
    """

    type: Literal["choice"] = "choice"
    options: tuple[str, ...] = Field(min_length=2)
    """The words to choose from."""

    def __call__(self, text: str) -> str | None:
        """The option as it is written in the settings."""
        longest_first = sorted(self.options, key=len, reverse=True)
        found = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", text, re.IGNORECASE)
        return next((option for option in self.options if found and option.casefold() == found[-1].casefold()), None)


@parser("text")
def text(said: str) -> str | None:
    """All of it."""
    return said.strip() or None


@parser("last_line")
def last_line(said: str) -> str | None:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), None)


@parser("integer")
def integer(said: str) -> int | None:
    r"""The last integer; commas between thousands are read over.

    >>> integer("12 * 99 makes 1,188.")
    1188
    """
    found = re.findall(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?![\w,])|(?<![\w.])-?\d+(?!\w)(?!\.\d)", said)
    digits = found[-1].replace(",", "") if found else ""
    return int(digits) if 0 < len(digits) <= 4000 else None


@parser("boxed")
def boxed(said: str) -> str | None:
    r"""The content of the last \boxed{...}.

    >>> boxed(r"so it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, opened, rest = said.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(rest if opened else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position].strip()
    return None


@parser("json")
def json_object(said: str) -> dict[str, Any] | None:
    """The last JSON object, inside a fence or not.

    >>> json_object('I think: {"verdict": "reject", "line": 3} as said.')
    {'verdict': 'reject', 'line': 3}
    """
    decoder, found, position = json.JSONDecoder(), None, said.find("{")
    while position >= 0:
        try:
            found, position = decoder.raw_decode(said, position)
        except (ValueError, RecursionError):
            position += 1
        position = said.find("{", position)
    return found
