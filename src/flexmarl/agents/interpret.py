"""Decides how an agent's text is read.

next_move   decides what follows a piece of text: more generation, a tool call, or the end of the reply
PARSERS     the table of parsers for a final text, each text -> value; None if the text holds no value
found       makes the signals of one call, from that call alone: a number in [0, 1] for each fault, and its tool calls

    tool_error          a tool call could not be read, named an unknown tool, had wrong arguments, or was refused by the
                        tool
    bad_tool_calls      share of the message's tool calls that could not be read; a message that ends the reply has
                        none: its calls count as dropped
    dropped_tool_calls  share of the message's tool calls that were not run: the budget was spent, or the text was cut
    tool_calls          number of the message's tool calls that were run
    tool_cost           sum of what its tools say that the message's tool calls cost, in a unit of their own
    format_error        the call ended the reply, but the agent's parser found no value, or the text holds a tool call
    language_mix        share of the call's letters that belong to no script of the task
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from flexmarl.plugins import Registry
from flexmarl.settings import Settings
from flexmarl.tools import Found, Incomplete, Malformed


class Ending(Enum):
    """How a piece of an agent's text ended."""

    AGENT = auto()
    """By the agent: its end token, or a stop string of its settings."""
    SYNTAX = auto()
    """By a stop string of the tool syntax: the agent would have continued."""
    LENGTH = auto()
    """By the token limit of the message."""


class Next(Enum):
    """The next move after a piece of an agent's text."""

    CONTINUE = auto()
    """Generate more of the message."""
    USE_TOOLS = auto()
    """Run the tool calls; a faulty one gets an error. All count towards the agent's `max_tool_calls`."""
    REPLY = auto()
    """Take the text as the reply."""


def next_move(calls: Sequence[Found], ending: Ending, *, may_call: bool) -> Next:
    """The move after a message so far, in which `calls` were found. `may_call`: the agent has tool calls left."""
    begun = bool(calls) and isinstance(calls[-1], Incomplete)
    if ending is Ending.SYNTAX and (begun or not calls):
        return Next.CONTINUE
    whole = any(not isinstance(call, Incomplete) for call in calls)
    if may_call and (whole or (begun and ending is Ending.AGENT)):
        return Next.USE_TOOLS
    return Next.REPLY


def unread(calls: Sequence[Found]) -> float:
    """Share of the calls that could not be read."""
    return sum(isinstance(call, Malformed | Incomplete) for call in calls) / len(calls) if calls else 0.0


Parser = Callable[[str], Any]

PARSERS: Registry[Parser] = Registry("parser", setting="parser", group="parsers")


def parser(name: str) -> Callable[[Parser], Parser]:
    """Decorator that registers a parser."""
    return PARSERS.register(name)


class Choice(Settings):
    """The option that occurs last in the text, as a whole word, in any case.

    >>> Choice(options=("approve", "reject"))("I cannot approve this. Reject!")
    'reject'
    """

    type: Literal["choice"] = "choice"
    options: tuple[str, ...] = Field(min_length=2)
    """The words to choose from."""

    def __call__(self, text: str) -> str | None:
        """The last option in the text, as it is written in the settings; None if there is none."""
        longest_first = sorted(self.options, key=len, reverse=True)
        found = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", text, re.IGNORECASE)
        return next((option for option in self.options if found and option.casefold() == found[-1].casefold()), None)


@parser("text")
def text(text: str) -> str | None:
    """The whole text; None if it is blank."""
    return text.strip() or None


@parser("last_line")
def last_line(text: str) -> str | None:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


@parser("integer")
def integer(text: str) -> int | None:
    r"""The last integer; commas between thousands are ignored.

    >>> integer("12 * 99 makes 1,188.")
    1188
    """
    found = re.findall(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?![\w,])|(?<![\w.])-?\d+(?!\w)(?!\.\d)", text)
    digits = found[-1].replace(",", "") if found else ""
    return int(digits) if 0 < len(digits) <= 4000 else None


@parser("boxed")
def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}.

    >>> boxed(r"so it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, opened, rest = text.rpartition(r"\boxed{")
    depth = 1
    for position, character in enumerate(rest if opened else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position].strip()
    return None


@parser("json")
def json_object(text: str) -> dict[str, Any] | None:
    """The last JSON object, in a code fence or not.

    >>> json_object('I think: {"verdict": "reject", "line": 3} as said.')
    {'verdict': 'reject', 'line': 3}
    """
    decoder, found, position = json.JSONDecoder(), None, text.find("{")
    while position >= 0:
        try:
            found, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
        position = text.find("{", position)
    return found


JAPANESE = frozenset({"HIRAGANA", "KATAKANA", "CJK"})


def found(
    *,
    tool_error: bool = False,
    bad_tool_calls: float = 0.0,
    dropped_tool_calls: float = 0.0,
    tool_calls: float = 0.0,
    tool_cost: float = 0.0,
    format_error: bool = False,
    language_mix: float = 0.0,
) -> Mapping[str, float]:
    """The signals that are not 0.

    >>> found(tool_error=True)
    {'tool_error': 1.0}
    """
    signals = {
        "tool_error": float(tool_error),
        "bad_tool_calls": bad_tool_calls,
        "dropped_tool_calls": dropped_tool_calls,
        "tool_calls": tool_calls,
        "tool_cost": tool_cost,
        "format_error": float(format_error),
        "language_mix": language_mix,
    }
    return {name: value for name, value in signals.items() if value}


def language_mix(text: str, task: str) -> float:
    """Share of a text's letters whose script does not occur in the task; 0 for a task without letters.

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
    """The scripts of a text's letters, by their Unicode names. Hiragana or Katakana add all three scripts of Japanese.

    >>> sorted(scripts("Größe 12"))
    ['LATIN']
    """
    written = frozenset(script for letter in set(_letters(text)) if (script := _script(letter)))
    return written | JAPANESE if written & {"HIRAGANA", "KATAKANA"} else written


def _letters(text: str) -> list[str]:
    # NFKC replaces compatibility forms, such as a wide or a mathematical A, by the letter itself.
    return [letter for letter in unicodedata.normalize("NFKC", text) if letter.isalpha()]


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """First word of the letter's Unicode name; empty for a letter of no script, such as a sign for a long vowel."""
    word = unicodedata.name(letter, "").partition(" ")[0]
    return "" if word == "MODIFIER" else word
