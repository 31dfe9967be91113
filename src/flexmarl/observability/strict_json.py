"""Decides what JSON of ours looks like, so that any program reads it; and reads JSON of anybody in bounded work.

JSON has no NaN and no infinity, though Python's encoder writes them. A figure that is not finite becomes null, as in
metrics.jsonl; any other number that is not finite becomes a text, as in the journal: "nan", "inf", "-inf".
"""

import json
import math
from collections.abc import Mapping
from typing import Any

READ_DEPTH = 200
"""Levels of nesting of what is read; Python's own limit depends on who calls, and ends in a RecursionError."""


def json_text(value: Any, *, figures: bool = False, indent: int | None = None) -> str:
    """The value as one line of ASCII, or indented; numbers that are not finite become texts, with `figures` null.

    >>> json_text({"rate": float("inf"), "steps": 3})
    '{"rate": "inf", "steps": 3}'
    """
    return json.dumps(_finite(value, figures), indent=indent, allow_nan=False, default=str)


def parse_json(text: str | bytes) -> Any:
    """The value in a JSON text. Raises ValueError saying what is wrong with it, and nothing else."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(f"more than {READ_DEPTH} levels of nesting") from None
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > READ_DEPTH and _deeper_than(value, READ_DEPTH):
        raise ValueError(f"more than {READ_DEPTH} levels of nesting")
    return value


def _finite(value: Any, figures: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if figures else repr(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item, figures) for key, item in value.items()}
    return [_finite(item, figures) for item in value] if isinstance(value, list | tuple) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON; use null")


def _deeper_than(value: Any, levels: int) -> bool:
    """Level by level, so that no depth of it is a depth of calls."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)
