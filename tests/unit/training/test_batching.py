"""Passes cover every row once, within bounds, at the least cost; padding keeps every token."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.training.batching import PASS_OVERHEAD_TOKENS, pad, plan_passes


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 6000))
@settings(max_examples=100, deadline=None)
def test_passes_hold_every_row_once_and_keep_within_the_bound(lengths: list[int], max_tokens: int) -> None:
    passes = plan_passes(np.array(lengths, dtype=np.int64), max_tokens)
    assert sorted(int(i) for rows in passes for i in rows) == list(range(len(lengths)))
    for rows in passes:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= max_tokens


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_other_cut_of_the_sorted_rows_is_cheaper(lengths: list[int]) -> None:
    ordered, n = sorted(lengths), len(lengths)

    def cost(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + PASS_OVERHEAD_TOKENS for group in groups)

    every_cut = [(0, *cut, n) for size in range(n) for cut in combinations(range(1, n), size)]
    cheapest = min(cost([ordered[a:b] for a, b in pairwise(cut)]) for cut in every_cut)
    planned = plan_passes(np.array(lengths), max_tokens=10**6)
    assert cost([[lengths[i] for i in rows] for rows in planned]) == cheapest


def test_padding_keeps_every_token_and_finds_who_predicts_it() -> None:
    rows = pad(
        [np.array([5, 6, 7, 8], dtype=np.int32), np.array([3, 4], dtype=np.int32)],
        [np.array([False, False, True, True]), np.array([False, True])],
    )
    assert rows.input_ids.tolist() == [[5, 6, 7], [3, 4, 0]]
    assert rows.positions.tolist() == [1, 2, 3]  # 6 predicts 7, 7 predicts 8, 3 predicts 4
    assert rows.targets.tolist() == [7, 8, 4]
