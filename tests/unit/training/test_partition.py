"""Which rank computes which rows."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.training.partition import partition, trees_of
from flexmarl.training.tree.merge import sort_rows

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=14)


def cost(rows: list[np.ndarray]) -> int:
    """Distinct prefixes: the tokens of their tree."""
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


@given(ROWS, st.integers(1, 5))
def test_each_row_is_on_one_rank_and_no_tree_is_cut(rows, ranks):
    arrays, names = [np.array(row) for row in rows], [f"row{n:02d}" for n in range(len(rows))]
    split = partition(arrays, names, ranks)
    assert len(split) == ranks
    assert sorted(row for of_rank in split for row in of_rank) == [*range(len(rows))]
    order, shared = sort_rows(arrays)
    lengths = np.array([len(arrays[row]) for row in order], dtype=np.int64)
    rank_of = {row: rank for rank, of_rank in enumerate(split) for row in of_rank}
    for tree in trees_of(lengths, shared):
        of_tree = [tuple(arrays[row]) for row in order[tree]]
        assert len({rank_of[row] for row in rank_of if tuple(arrays[row]) in of_tree}) == 1


@given(ROWS, st.integers(2, 4), st.randoms())
def test_the_split_does_not_depend_on_the_order_of_the_rows(rows, ranks, shuffles: random.Random):
    arrays = {f"row{n:02d}": np.array(row) for n, row in enumerate(rows)}

    def named(names: list[str]) -> list[set[str]]:
        split = partition([arrays[name] for name in names], names, ranks)
        return [{names[row] for row in of_rank} for of_rank in split]

    names = list(arrays)
    before = named(names)
    shuffles.shuffle(names)
    assert named(names) == before


@given(ROWS, st.integers(1, 4))
def test_the_longest_rank_has_at_most_its_share_and_one_tree_more(rows, ranks):
    arrays = [np.array(row) for row in rows]
    split = partition(arrays, [f"row{n:02d}" for n in range(len(rows))], ranks)
    order, shared = sort_rows(arrays)
    lengths = np.array([len(arrays[row]) for row in order], dtype=np.int64)
    trees = [cost([arrays[row] for row in order[tree]]) for tree in trees_of(lengths, shared)]
    longest = max(cost([arrays[row] for row in of_rank]) for of_rank in split)
    assert longest <= sum(trees) / ranks + max(trees, default=0)


def test_a_system_prompt_that_all_rows_share_does_not_make_them_one_tree():
    prompt = np.arange(10)
    rows = [np.append(prompt, np.arange(100 * n, 100 * n + 20)) for n in range(1, 5)]
    assert sorted(map(len, partition(rows, list("abcd"), 2))) == [2, 2]
