"""Decides what was found in a call, from that call alone: a number in [0, 1] for each thing that went wrong.

tool_error     its tool call could not be understood, named no tool that there is, or was refused for a fault of its own
format_error   it was to stand as the reply, and the agent's parser made nothing of it, or it holds a tool call
language_mix   share of its letters that are of no script of the task
"""

import unicodedata
from collections.abc import Mapping
from functools import lru_cache

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
