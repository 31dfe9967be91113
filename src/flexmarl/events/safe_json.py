"""Decides how values are written as JSON: plain, bounded in size, without secrets. Reads foreign JSON in bounded work.

Secrets are recognised by the name of their key and by the pattern of their text (`is_secret_key`, `masked`):

>>> masked("curl -H 'Authorization: Bearer abc.def'")
"curl -H 'Authorization: Bearer ***'"
>>> masked(f"http://127.0.0.1:8000/e/{32 * '0'}/solver/v1")
'http://127.0.0.1:8000/e/***/solver/v1'
>>> is_secret_key("HF_TOKEN"), is_secret_key("num_tokens"), is_secret_key("tokenizer")
(True, False, False)

JSON has no NaN and no infinity, although Python's encoder writes them, and other programs refuse them. A figure that is
not finite becomes null, as in metrics.jsonl. Any other number that is not finite becomes a text, as in the journal:
"nan", "inf", "-inf".
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import from_json

from flexmarl.errors import text_of

MASK = "***"

# Many keys name counts of tokens, so "token" marks a secret only at the end of a key.
_SECRET_KEY = re.compile(
    r"passw(or)?d|passphrase|secret|authorization|credential|cookie|(api|access|private)[-_ .]?key|token$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"(?i:(?P<keep>bearer\s+|(?:password|secret|token|api[-_]?key)(?:=|['\"]:\s*)))"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s'\",;&)}]+)"
    r"|hf_[A-Za-z0-9]{8,}|(?<![A-Za-z0-9])e2b_[0-9a-f]{16,}|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}|(?<=/e/)[0-9a-f]{32}"
)


def is_secret_key(key: str) -> bool:
    """True if every value under this key is masked."""
    return _SECRET_KEY.search(key) is not None


def masked(text: str) -> str:
    """The text without bearer tokens, keys of known forms, and values of `password=...` or `'token': ...`.

    The forms are `hf_...`, `sk-...` and `e2b_...`. Keys of episodes are masked in addresses of the gateway (`/e/KEY/`).
    """
    return _SECRET_TEXT.sub(lambda match: (match["keep"] or "") + MASK, text) if _suspicious(text.lower()) else text


def _suspicious(text: str) -> bool:
    # A search for plain words is many times faster than the regular expression, and rules out nearly all texts.
    if "hf_" in text or "sk-" in text or "e2b_" in text or "bearer" in text or "/e/" in text:
        return True
    assigns = "=" in text or "':" in text or '":' in text
    return assigns and ("password" in text or "secret" in text or "token" in text or "key" in text)


MAX_TEXT = 10_000
"""Most characters of a string. Longer ones are cut off; the experience store has the whole texts."""
MAX_ARRAY = 1024
"""Most elements of an array. A larger one is replaced by its type and shape."""
MAX_BITS = 1024
"""Most bits of an integer. A larger one is replaced by its size."""
WRITE_DEPTH = 24
"""Most levels of nesting that are written. A deeper value most likely contains itself."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value in types that JSON has. Other values become text (`"nan"`, a path, an error with its type)."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is bool or value is None:
        return value
    if kind is int:  # Python raises ValueError for integers of thousands of digits.
        return value if value.bit_length() <= MAX_BITS else f"integer of {value.bit_length()} bits"
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):  # An id, or a member of an enum.
        return _text(str.__str__(value))
    if depth > WRITE_DEPTH:
        return "..."
    if kind is dict:
        return _mapping(value.items(), depth)
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item(), depth + 1)
    if isinstance(value, Mapping):
        return _mapping(value.items(), depth)
    if isinstance(value, Enum):
        return plain(value.value, depth + 1)
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), depth + 1) if value.size <= MAX_ARRAY else f"{value.dtype}{list(value.shape)}"
    if is_dataclass(value) and not isinstance(value, type):
        return _mapping(((field.name, getattr(value, field.name)) for field in fields(value)), depth)
    if isinstance(value, BaseModel):
        return _mapping(iter(value), depth)
    if isinstance(value, Set):
        return [plain(item, depth + 1) for item in sorted(value, key=repr)]
    if isinstance(value, BaseException):
        return _text(f"{kind.__name__}: {text_of(value)}")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    if isinstance(value, (int, float)):
        return plain(int(value) if isinstance(value, int) else float(value), depth + 1)
    return _text(str(value))


def _mapping(items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
    written = {}
    for key, item in items:
        name, secret = _key(key if type(key) is str else str(key))
        written[name] = MASK if secret and item is not None else plain(item, depth + 1)
    return written


@lru_cache(maxsize=4096)
def _key(key: str) -> tuple[str, bool]:
    return _text(key), is_secret_key(key)


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        # Masked before the cut, since half of a secret might no longer be recognised as one.
        return f"{masked(text)[:MAX_TEXT]}... ({len(text)} characters)"
    return masked(text)


READ_DEPTH = 200
"""Most levels of nesting that are read. Python's own limit depends on the caller's depth and raises RecursionError."""


def json_text(value: Any, *, figures: bool = False, indent: int | None = None) -> str:
    """The value as a line of ASCII, or indented. Numbers that are not finite become texts; with `figures`, null.

    >>> json_text({"rate": float("inf"), "steps": 3})
    '{"rate": "inf", "steps": 3}'
    """
    return json.dumps(_finite(value, figures), indent=indent, allow_nan=False, default=str)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises only ValueError, whose message says what is wrong with the text."""
    try:  # Three times as fast. It reads no more levels, and refuses some texts that Python reads.
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        pass
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
    """True if `value` has more than `levels` levels. Does not recurse, so no depth raises RecursionError."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)
