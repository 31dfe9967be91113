"""Sums of 64-bit words on numpy: the part of a digest that adds up from parts, in any order and on any device.

    a block of bytes:     | w0 | w1 | w2 | ...        64-bit words, little-endian; padding is zero
    sums                  S = sum of w[p] c[p]         mod 2^64, c[p] odd
                          T = sum of (w[p] >> 32) d[p] mod 2^64, d[p] odd, w signed
    coefficients          c[p] = table[p mod BLOCK] factor[p div BLOCK], d alike

Both sums are linear in the bytes, so the sums of parts add up to those of the whole, whoever computed them. A change of
one word always changes S, as c[p] is odd. T is needed because a word's highest bits meet only the lowest bits of c in
S: with S alone, two flipped signs could cancel. Two changes cancel in both sums with a probability of 2^-32 at most;
for a torn, stale or swapped block it is 2^-64 or less. The digest is not cryptographic: two blocks with the same sums
can be made on purpose. This file imports no torch; objects/tensors.py sums tensors on any device.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BLOCK = 1 << 15
"""Words that share a factor. Their coefficients, 256 KiB a sum, stay in a core's cache; fewer need more calls."""
WORD_BYTES = 8
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sums:
    """The two sums, S and T, of a part of a block. The sums of disjoint parts add up."""

    words: int = 0
    upper: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums((self.words + other.words) & MASK, (self.upper + other.upper) & MASK)


def array_sums(array: np.ndarray, first: int) -> Sums:
    """Sums of int64 words, the first of which is at position `first`.

    Each block is read into the cache once, and multiplied there twice.
    """
    table, upper_table = tables()
    upper = np.empty(min(BLOCK, len(array)), np.int64)
    sums, at = [0, 0], 0
    while at < len(array):
        block, start = divmod(first + at, BLOCK)
        size = min(BLOCK - start, len(array) - at)
        piece, halves = array[at : at + size], upper[:size]
        np.right_shift(piece, 32, out=halves)
        factor, upper_factor = _block_factors(block)
        # numpy's loop over 64-bit integers is half as long as that of `torch.dot`.
        sums[0] += factor * int(np.einsum("i,i", piece, table[start : start + size]))
        sums[1] += upper_factor * int(np.einsum("i,i", halves, upper_table[start : start + size]))
        at += size
    return Sums(sums[0] & MASK, sums[1] & MASK)


@lru_cache(maxsize=1)
def tables() -> tuple[np.ndarray, np.ndarray]:
    """The tables of c and of d, in int64."""
    within = np.arange(BLOCK)
    return _odd_factor(within, 0).view(np.int64), _odd_factor(within, 1).view(np.int64)


def factors_of(first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of c and of d of `number` blocks, in int64."""
    blocks = np.arange(first, first + number)
    return _odd_factor(blocks, 2).view(np.int64), _odd_factor(blocks, 3).view(np.int64)


@lru_cache(maxsize=1 << 12)
def _block_factors(block: int) -> tuple[int, int]:
    (factor,), (upper_factor,) = factors_of(block, 1)
    return int(factor), int(upper_factor)


def _odd_factor(index: np.ndarray, stream: int) -> np.ndarray:
    """Odd 64-bit numbers: splitmix64 (Steele et al. 2014) at the places `index` of one of four streams."""
    with np.errstate(over="ignore"):
        z = (index.astype(np.uint64) + np.uint64(stream << 40) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
