"""Decides how any value is written as JSON: plain, bounded in size, and without secrets."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel

from flexmarl.errors import text_of
from flexmarl.observability.secrets import MASK, is_secret_key, masked

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
