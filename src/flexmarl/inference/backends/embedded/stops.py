"""Decides whether a response has ended by a stop id or a stop string.

A stop string may straddle tokens, so it is searched in decoded text. Decoding at every token would cost more than the
model; so one table over the vocabulary says which tokens *could* end a response, filled in as tokens turn up, and only
those are looked at closely.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexmarl.records import Sampling

Decode = Callable[[Sequence[int]], str]
_NO, _SUSPECT, _UNKNOWN = 0, 1, 2
_SPARE_TOKENS = 8


class StopWatch:
    """The table for the stop conditions seen so far; more of them only make it less selective, never wrong."""

    def __init__(self, vocabulary: int, decode: Decode | None) -> None:
        self._decode = decode
        self._last_characters: set[str] = set()
        self._ids: set[int] = set()
        self._table: NDArray[np.int8] = np.zeros(vocabulary, dtype=np.int8)
        self._armed = False

    def refuse(self, sampling: Sampling) -> str:
        """Why these stop conditions cannot be watched, or nothing."""
        if sampling.stop and self._decode is None:
            return f"sampling.stop is {sampling.stop!r}, but this engine has no tokenizer; use stop_ids"
        if "" in sampling.stop:
            return f"sampling.stop must hold no empty string, got {sampling.stop!r}"
        return ""

    def watch(self, sampling: Sampling) -> None:
        """Widens the table to these conditions."""
        characters = {stop[-1] for stop in sampling.stop} - self._last_characters
        ids = set(sampling.stop_ids) - self._ids
        if characters:
            self._last_characters |= characters
            self._table[self._table == _NO] = _UNKNOWN
        if ids:
            self._ids |= ids
            self._table[[i for i in ids if 0 <= i < len(self._table)]] = _SUSPECT
        self._armed = self._armed or bool(characters or ids)

    def suspects(self, tokens: NDArray[np.int64]) -> Sequence[int]:
        """Indices of the tokens after which a response may have ended."""
        if not self._armed:
            return ()
        found = np.flatnonzero(self._table[tokens]).tolist()
        return [index for index in found if self._suspect(int(tokens[index]))]

    def ended(self, sampling: Sampling, response: NDArray[np.int32]) -> bool:
        """Whether the response, whose last token is new, contains a stop string or ends with a stop id."""
        if int(response[-1]) in sampling.stop_ids:
            return True
        if not sampling.stop or self._decode is None:
            return False
        # The tail first: long enough to hold the longest stop string even if every token were a single byte.
        longest = max(sampling.stop, key=len)
        width = len(longest.encode()) + _SPARE_TOKENS
        tail = self._decode(response[-width:].tolist())
        while len(tail) < len(longest) + _SPARE_TOKENS and width < len(response):
            width *= 2
            tail = self._decode(response[-width:].tolist())
        if not any(stop in tail for stop in sampling.stop):
            return False
        if width >= len(response):
            return True
        text = self._decode(response.tolist())
        return any(stop in text for stop in sampling.stop)

    def _suspect(self, token: int) -> bool:
        """A token can complete a stop string if its text has the string's last character.

        Text that depends on its neighbours (parts of a UTF-8 character, blanks that decoders strip) is suspect too.
        """
        if self._table[token] == _UNKNOWN:
            assert self._decode is not None
            piece = self._decode([token])
            suspect = "\ufffd" in piece or not piece.strip() or not self._last_characters.isdisjoint(piece)
            self._table[token] = _SUSPECT if suspect else _NO
        return self._table[token] == _SUSPECT
