"""Decides how JSON is written: plain, bounded in size, without secrets; and reads JSON in bounded work.

Decides what must not be written down: secrets, by the name of their key and by the look of their text.

>>> masked("curl -H 'Authorization: Bearer abc.def'")
"curl -H 'Authorization: Bearer ***'"
>>> is_secret_key("HF_TOKEN"), is_secret_key("num_tokens"), is_secret_key("tokenizer")
(True, False, False)

Decides how any value is written as JSON: plain, bounded in size, and without secrets.

Decides what JSON of ours looks like, so that any program reads it; and reads JSON of anybody in bounded work.

JSON has no NaN and no infinity, though Python's encoder writes them. A figure that is not finite becomes null, as in
metrics.jsonl; any other number that is not finite becomes a text, as in the journal: "nan", "inf", "-inf".
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

from flexmarl.errors import text_of

MASK = "***"

# Counts of tokens are everywhere here, so "token" is a secret only as a key's last word.
_SECRET_KEY = re.compile(
    r"passw(or)?d|passphrase|secret|authorization|credential|cookie|(api|access|private)[-_ .]?key|token$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"(?i:(?P<keep>bearer\s+|(?:password|secret|token|api[-_]?key)(?:=|['\"]:\s*)))"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s'\",;&)}]+)"
    r"|hf_[A-Za-z0-9]{8,}|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}"
)


def is_secret_key(key: str) -> bool:
    """Whether the value under this key is masked whatever it is."""
    return _SECRET_KEY.search(key) is not None


def masked(text: str) -> str:
    """The text without bearer tokens, `hf_...` and `sk-...` keys, and values of `password=...` or `'token': ...`."""
    return _SECRET_TEXT.sub(lambda match: (match["keep"] or "") + MASK, text) if _suspicious(text.lower()) else text


def _suspicious(text: str) -> bool:
    # A search for plain words is many times cheaper than the expression, and nearly always enough.
    if "hf_" in text or "sk-" in text or "bearer" in text:
        return True
    assigns = "=" in text or "':" in text or '":' in text
    return assigns and ("password" in text or "secret" in text or "token" in text or "key" in text)


MAX_TEXT = 10_000
"""Characters of one string; the texts themselves are in the experience store."""
MAX_ARRAY = 1024
"""Elements of one array; a larger one is named by its type and shape."""
MAX_BITS = 1024
"""Of one integer."""
WRITE_DEPTH = 24
"""Levels of nesting; whoever goes deeper most likely holds itself."""


def plain(value: Any, depth: int = 0) -> Any:
    """The value in JSON's own types; what JSON lacks becomes text (`"nan"`, a path, an error with its type)."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is bool or value is None:
        return value
    if kind is int:  # Python refuses to write thousands of digits.
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
        # Masked before the cut: half of a key is still half a key.
        return f"{masked(text)[:MAX_TEXT]}... ({len(text)} characters)"
    return masked(text)


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
