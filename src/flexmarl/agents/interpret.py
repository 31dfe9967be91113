"""Decides what an agent's text says: what follows it, what it is parsed to, and what went wrong in it.

Decides what follows a piece of an agent's text: does it go on, use a tool, or stand as the reply?

Decides what an agent's final text says: one table of parsers, each text -> value, None where it says nothing.

Decides what was found in a call, from that call alone: a number in [0, 1] for each thing that went wrong.

tool_error     its tool call could not be understood, named no tool that there is, or was refused for a fault of its own
format_error   it was to stand as the reply, and the agent's parser made nothing of it, or it holds a tool call
language_mix   share of its letters that are of no script of the task
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from flexmarl.settings import Settings
from flexmarl.tasks.registry import Registry
from flexmarl.tools import Incomplete, Malformed, Parsed, ToolCall


class Ending(Enum):
    """What ended the piece."""

    OWN = auto()
    """The agent: its end token, or a stop string of its settings."""
    SYNTAX = auto()
    """A stop string of the tool syntax: the agent would have gone on."""
    LENGTH = auto()
    """The token limit of the message."""


class Next(Enum):
    """What follows."""

    GO_ON = auto()
    USE_TOOL = auto()
    """Or tell the agent what is wrong with its call; either is one of its calls."""
    STAND = auto()


def next_move(call: Parsed, ending: Ending, *, may_call: bool) -> Next:
    """What follows a message that holds this call so far."""
    match call, ending:
        case (None | Incomplete(), Ending.SYNTAX):
            return Next.GO_ON
        case (ToolCall() | Malformed(), _) | (Incomplete(), Ending.OWN) if may_call:
            return Next.USE_TOOL
        case _:
            return Next.STAND


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


JAPANESE = frozenset({"HIRAGANA", "KATAKANA", "CJK"})


def found(*, tool_error: bool = False, format_error: bool = False, language_mix: float = 0.0) -> Mapping[str, float]:
    """The signals that are not 0.

    >>> found(tool_error=True)
    {'tool_error': 1.0}
    """
    signals = {"tool_error": float(tool_error), "format_error": float(format_error), "language_mix": language_mix}
    return {name: value for name, value in signals.items() if value}


def language_mix(text: str, task: str) -> float:
    """Share of the letters of a text that are of no script that the task is written in; 0 for a task without letters.

    >>> language_mix("the answer is ответ", "What is it?")
    0.3125
    """
    allowed = scripts(task)
    if not allowed or (text.isascii() and "LATIN" in allowed):
        return 0.0
    written = [script for letter in _letters(text) if (script := _script(letter))]
    return sum(script not in allowed for script in written) / len(written) if written else 0.0


@lru_cache(maxsize=1024)
def scripts(text: str) -> frozenset[str]:
    """The scripts of the letters of a text, by their Unicode names; Japanese is written in three.

    >>> sorted(scripts("Größe 12"))
    ['LATIN']
    """
    written = frozenset(script for letter in set(_letters(text)) if (script := _script(letter)))
    return written | JAPANESE if written & {"HIRAGANA", "KATAKANA"} else written


def _letters(text: str) -> list[str]:
    # Compatibility forms are the letter itself: a wide A, a mathematical A.
    return [letter for letter in unicodedata.normalize("NFKC", text) if letter.isalpha()]


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """First word of the letter's name; empty for one that is of no script, as the sign of a vowel's length is."""
    word = unicodedata.name(letter, "").partition(" ")[0]
    return "" if word == "MODIFIER" else word
