"""Random rows that share prefixes in every way that rows can."""

import numpy as np
from hypothesis import strategies as st

from flexmarl.records import IntArray


def random_rows(
    random: np.random.Generator, count: int, vocabulary: int, longest: int = 12
) -> list[tuple[IntArray, int]]:
    """Rows and how many of their last tokens are sampled.

    Forks, continued rows, strict prefixes, duplicates, one-token segments, and rows that share nothing.
    """
    rows: list[tuple[IntArray, int]] = []
    for _ in range(count):
        kind = random.integers(6) if rows else 0
        base, sampled = rows[random.integers(len(rows))] if rows else (np.zeros(0, np.int32), 0)
        new = random.integers(0, vocabulary, random.integers(2, longest)).astype(np.int32)
        if kind == 1 and len(base) > 2:  # a strict prefix
            row = base[: random.integers(2, len(base))]
        elif kind == 2:  # a duplicate
            rows.append((base, sampled))
            continue
        elif kind == 3:  # one more token: many labels behind one node
            row = np.append(base[:-1], new[0]).astype(np.int32)
        elif kind == 0:
            row = new
        else:  # a fork, or a call that continues another
            row = np.concatenate((base[: random.integers(1, len(base) + 1)], new)).astype(np.int32)
        rows.append((row, int(random.integers(1, len(row)))))
    return rows


@st.composite
def forests(draw: st.DrawFn, most: int = 14) -> list[tuple[IntArray, int]]:
    """The same, as hypothesis draws them."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    return random_rows(
        random, draw(st.integers(1, most)), draw(st.sampled_from([2, 4, 50])), draw(st.sampled_from([3, 12, 90]))
    )
