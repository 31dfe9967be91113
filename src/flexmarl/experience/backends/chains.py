"""Tensors on SQLite that begin with other rows' tensors: kept as the payload keys of these, and what follows them.

    hop 0   prompt  [. . . .]          response  [. . .]
    hop 1   prompt  +key,key; [. .]    response  [. . . .]      begins with hop 0's prompt and response
    hop 2   prompt  +key,key; [.]      response  [. .]          begins with hop 1's, and so with hop 0's

A payload that is no chain begins with its dtype, never with `+` (`schema.py`).
"""

import sqlite3
from collections.abc import Sequence

import numpy as np

from flexmarl.errors import StoreError
from flexmarl.experience.schema import decode_tensor, encode_tensor

MARK = b"+"


def chain(keys: Sequence[int], tail: np.ndarray) -> bytes:
    """The payload of a tensor that begins with what is in these payloads, and ends with `tail`."""
    return MARK + ",".join(map(str, keys)).encode() + b";" + encode_tensor(tail)


def is_chain(stored: object) -> bool:
    """Whether a cell's payload is a chain."""
    return isinstance(stored, bytes) and stored.startswith(MARK)


class Chains:
    """Reads chains on one connection; what it has read it remembers, so it lives as long as one call."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._read: dict[int, np.ndarray] = {}

    def whole(self, stored: bytes) -> np.ndarray:
        """All of the tensor in a payload, a fresh copy."""
        parts: list[np.ndarray] = []
        while is_chain(stored):  # not by recursion: a chain is as long as its conversation
            keys, tail = _split(stored)
            parts += [decode_tensor(tail), *(self._at(key) for key in reversed(keys[1:]))]
            if keys[0] in self._read:
                stored = b""
                parts.append(self._read[keys[0]])
            else:
                stored = self._payload(keys[0])
        if stored:
            parts.append(decode_tensor(stored))
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def beginning(self, keys: Sequence[int]) -> np.ndarray:
        """The tensors in these payloads, one after the other."""
        return np.concatenate([self._at(key) for key in keys])

    def _at(self, key: int) -> np.ndarray:
        if key not in self._read:
            self._read[key] = self.whole(self._payload(key))
        return self._read[key]

    def _payload(self, key: int) -> bytes:
        found = self._db.execute("SELECT value FROM payloads WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise StoreError(f"payload {key}, with which a tensor begins, is not there: the store is damaged")
        return found[0]


def _split(stored: bytes) -> tuple[list[int], bytes]:
    keys, _, tail = stored.removeprefix(MARK).partition(b";")
    return [int(key) for key in keys.split(b",")], tail
