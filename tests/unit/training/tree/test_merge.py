"""Merged rows: every (prefix, token) once, found again from every row, whatever the rows' order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.records import IntArray
from flexmarl.training.tree.merge import PrefixTree, merge, sort_rows
from tests.unit.training.tree.forests import forests

Forest = list[tuple[IntArray, int]]


def tree_of(forest: Forest) -> PrefixTree:
    return merge([row for row, _ in forest], [count for _, count in forest])


@given(forests())
@settings(max_examples=150, deadline=None)
def test_every_distinct_prefix_is_one_node_and_its_ancestors_spell_it(forest: Forest) -> None:
    tree = tree_of(forest)
    prefixes = {tuple(row[: end + 1].tolist()) for row, _ in forest for end in range(len(row))}
    ends = tree.ends
    spelled = set()
    for node in range(tree.num_tokens):
        path = [k for k in range(node + 1) if node < ends[k]]
        assert tree.depths[path].tolist() == list(range(len(path)))
        spelled.add(tuple(tree.tokens[path].tolist()))
    assert spelled == prefixes
    assert tree.num_tokens == len(prefixes)


@given(forests())
@settings(max_examples=150, deadline=None)
def test_each_label_is_predicted_by_the_node_of_its_rows_prefix(forest: Forest) -> None:
    tree, ends, offset = tree_of(forest), None, 0
    ends = tree.ends
    for row, count in forest:
        for depth, node in zip(
            range(len(row) - count, len(row)), tree.predictors[offset : offset + count], strict=True
        ):
            path = [k for k in range(node + 1) if node < ends[k]]
            assert tree.tokens[path].tolist() == row[: depth + 1].tolist()
        offset += count
    assert offset == len(tree.predictors)


@given(forests(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_t2_the_order_of_the_rows_does_not_matter(forest: Forest, random: st.DataObject) -> None:
    shuffled = list(forest)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = tree_of(forest), tree_of(shuffled)
    for name in ("tokens", "depths", "starts", "stops", "subtree_stops"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_calls_that_continue_one_another_are_a_chain_without_a_fork() -> None:
    row = np.arange(50, dtype=np.int32)
    tree = merge([row[:20], row[:35], row], [5, 5, 5])
    assert tree.tokens.tolist() == row.tolist()
    assert tree.stops.tolist() == [20, 35, 50]
    assert tree.predictors.tolist() == [*range(15, 20), *range(30, 35), *range(45, 50)]


def test_rows_are_sorted_as_numbers_not_as_bytes_of_this_machine() -> None:
    rows = [
        np.array([256], np.int32),
        np.array([1], np.int32),
        np.array([70000, 1], np.int32),
        np.array([70000], np.int32),
    ]
    order, shared = sort_rows(rows)
    assert order.tolist() == [1, 0, 3, 2]
    assert shared.tolist() == [0, 0, 0, 1]
