"""Differences of files on numpy: the places and values of what changed between two pieces of one size.

    8 + 8 bytes: the sums S and T of the new piece (word_sums.py) | 4: number of steps | steps | values | last byte

The pieces are compared as words of two bytes, whatever they hold, so that NaN and -0.0 cross as they are. No element's
size need be known: most published weights have two bytes, and one changed word of a larger element is all that crosses
of it. A step is one byte: 0 to 254 unchanged words and then a changed one, or 255 unchanged words. A piece of odd size
has its last byte at the end. This file imports no torch.
"""

import struct

import numpy as np

from flexmarl.cluster.word_sums import WORD_BYTES, Sums, array_sums

LEAST_SAVING = 2
"""A difference crosses only where the piece itself is at least so many times as large."""
_HEAD = struct.Struct("<QQI")
_WORD = np.dtype("<u2")
_FAR = 255
"""The step over unchanged words alone."""
_CHANGE_BYTES = 1 + _WORD.itemsize
"""Bytes that a changed word takes at least."""
_COMPARED = 1 << 19
"""Words that are compared in one go, 1 MiB: what it costs to find that a difference does not pay."""


def difference(base: np.ndarray, new: np.ndarray) -> bytes:
    """The difference by which `patch` makes `new` of `base`, both in uint8 and of one size.

    Returns b"" if that would be more than half of `new`, or as soon as that is so of the part compared so far.

    >>> one, other = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    >>> other[60] = 7
    >>> len(difference(one, other))
    23
    """
    words, was = _words(new), _words(base)
    found: list[np.ndarray] = []
    changed = 0
    for at in range(0, len(words), _COMPARED):
        differs = words[at : at + _COMPARED] != was[at : at + _COMPARED]
        changed += np.count_nonzero(differs)
        compared = min(at + _COMPARED, len(words)) * _WORD.itemsize
        if LEAST_SAVING * _CHANGE_BYTES * changed > compared:
            return b""
        found.append(np.flatnonzero(differs).astype(np.int32) + np.int32(at))
    positions = np.concatenate(found) if found else np.empty(0, np.int32)
    steps = _steps(positions)
    last = new[len(words) * _WORD.itemsize :]
    sums = _sums(new)
    head = _HEAD.pack(sums.words, sums.upper, len(steps))
    made = b"".join((head, steps.tobytes(), words[positions].tobytes(), last.tobytes()))
    return made if LEAST_SAVING * len(made) <= len(new) else b""


def patch(delta: bytes, base: np.ndarray, into: np.ndarray) -> bool:
    """Makes the new piece `into` of its base. Returns False if the sums of what it made are not those of the new piece.

    `base` and `into` are as for `difference`. A damaged difference makes no error: then the sums are others, or it has
    places that the piece does not have.
    """
    if len(delta) < _HEAD.size:
        return False
    words, upper, number = _HEAD.unpack_from(delta)
    values_at, end = _HEAD.size + number, len(delta) - len(into) % _WORD.itemsize
    if values_at > end or (end - values_at) % _WORD.itemsize:
        return False
    positions = _positions(np.frombuffer(delta, np.uint8, number, _HEAD.size))
    values = np.frombuffer(delta[values_at:end], _WORD)
    target = _words(into)
    if len(positions) != len(values) or (len(positions) and positions[-1] >= len(target)):
        return False
    np.copyto(into, base)
    target[positions] = values
    into[len(target) * _WORD.itemsize :] = np.frombuffer(delta[end:], np.uint8)
    return _sums(into) == Sums(words, upper)


def _words(piece: np.ndarray) -> np.ndarray:
    """The piece as words, without the last byte of an odd one."""
    return piece[: len(piece) // _WORD.itemsize * _WORD.itemsize].view(_WORD)


def _steps(positions: np.ndarray) -> np.ndarray:
    """The steps that lead to these positions, which rise."""
    gaps = np.diff(positions, prepend=np.int32(-1)) - 1
    far = gaps // _FAR
    steps = np.full(len(gaps) + int(far.sum()), _FAR, np.uint8)
    steps[np.cumsum(far + 1) - 1] = gaps - far * _FAR
    return steps


def _positions(steps: np.ndarray) -> np.ndarray:
    """The inverse of `_steps`."""
    ends = steps < _FAR
    return np.cumsum(steps.astype(np.int64) + ends)[ends] - 1


def _sums(piece: np.ndarray) -> Sums:
    """Sums of a piece, as if it began a block."""
    whole = len(piece) // WORD_BYTES * WORD_BYTES
    rest = np.zeros(WORD_BYTES, np.uint8)
    rest[: len(piece) - whole] = piece[whole:]
    return array_sums(piece[:whole].view(np.int64), 0) + array_sums(rest.view(np.int64), whole // WORD_BYTES)
