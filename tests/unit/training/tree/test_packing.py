"""Cuts into trees within the bound at the least cost, and when a tree pays."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.records import IntArray
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS, plan_passes
from flexmarl.training.tree.cost import MARGIN, RATES, ModelShape, pays
from flexmarl.training.tree.kernels import BLOCK
from flexmarl.training.tree.merge import cut, merge, sort_rows
from flexmarl.training.tree.pieces import attention_pieces
from tests.unit.training.tree.forests import forests

SHAPE = ModelShape(linear_parameters=1_600_000, num_layers=2, attention_width=256)


def sizes(rows: list[IntArray], cuts: list[slice]) -> list[int]:
    return [merge(rows[part], [1] * len(rows[part])).num_tokens for part in cuts]


@given(forests(most=9), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_cuts_hold_every_row_within_the_bound_at_the_least_cost(forest: list[tuple[IntArray, int]], most: int) -> None:
    order, shared = sort_rows([row for row, _ in forest])
    rows = [forest[i][0] for i in order]
    cuts = cut(np.array([len(row) for row in rows]), shared, most)
    assert [i for part in cuts for i in range(len(rows))[part]] == list(range(len(rows)))

    def cost(parts: list[slice]) -> float:
        nodes = sizes(rows, parts)
        fits = all(n <= most or part.stop - part.start == 1 for n, part in zip(nodes, parts, strict=True))
        return sum(nodes) + PASS_OVERHEAD_TOKENS * len(parts) if fits else np.inf

    n = len(rows)
    every_cut = [(0, *inner, n) for size in range(n) for inner in combinations(range(1, n), size)]
    assert cost(cuts) == min(cost([slice(a, b) for a, b in pairwise(edges)]) for edges in every_cut)


def test_a_cut_goes_where_the_least_is_shared() -> None:
    rows = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 7, 8, 9], [1, 7, 8, 6])]
    assert cut(np.full(4, 4), sort_rows(rows)[1], max_tokens=5) == [slice(0, 2), slice(2, 4)]


def test_of_equal_cuts_the_earliest_is_taken() -> None:
    assert cut(np.ones(3, np.int64), np.zeros(3, np.int64), max_tokens=2) == [slice(0, 1), slice(1, 3)]


def cost_of(rows: list[IntArray]) -> tuple[float, float]:
    tree = merge(rows, [1] * len(rows))
    return SHAPE.cost_of_tree(tree), SHAPE.cost_of_rows(np.array([len(r) for r in rows]))


def test_a_long_shared_prompt_pays_and_equal_rows_that_share_nothing_do_not() -> None:
    random = np.random.default_rng(0)
    prompt = random.integers(0, 500, 400)
    group = [np.concatenate((prompt, random.integers(0, 500, 100))) for _ in range(8)]
    apart = [random.integers(0, 500, 500) for _ in range(8)]
    assert pays(*cost_of(group))
    assert not pays(*cost_of(apart))


def test_what_padding_costs_is_no_reason_for_a_tree() -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(0, 60, length) for length in random.integers(35, 126, 60)]
    tree, shape = merge(rows, [1] * len(rows)), ModelShape(linear_parameters=394_000, num_layers=2, attention_width=128)
    lengths = np.array([len(row) for row in rows])
    as_rows = sum(shape.cost_of_rows(lengths[part]) for part in plan_passes(lengths + 1, 16384))
    assert not pays(shape.cost_of_tree(tree), as_rows)


@given(forests())
def test_no_tree_costs_less_than_its_nodes_and_visible_pairs_in_one_call(forest: list[tuple[IntArray, int]]) -> None:
    order, shared = sort_rows([row for row, _ in forest])
    rows = [forest[i][0] for i in order]
    tree = merge(rows, [1] * len(rows))
    least = SHAPE.least_cost_of_tree(np.array([len(row) for row in rows]), shared)
    assert least == pytest.approx(SHAPE.cost(tokens=tree.num_tokens, pairs=(tree.depths + 1).sum(), calls=1))
    assert least <= SHAPE.cost_of_tree(tree) * (1 + 1e-12)


def test_a_pass_costs_its_tokens_its_pairs_and_its_calls() -> None:
    linear, attention = 6 * 1_600_000, 2 * 14 * 256 * RATES["cpu"].attention
    nothing = SHAPE.cost(tokens=0, pairs=0, calls=0)
    assert nothing == linear * PASS_OVERHEAD_TOKENS
    assert SHAPE.cost(tokens=10, pairs=0, calls=0) - nothing == pytest.approx(linear * 10)
    assert SHAPE.cost(tokens=0, pairs=100, calls=0) - nothing == pytest.approx(attention * 100)
    assert SHAPE.cost(tokens=0, pairs=0, calls=3) - nothing == pytest.approx(2 * RATES["cpu"].call * 3)
    assert SHAPE.cost_of_rows(np.array([3, 5])) == SHAPE.cost(tokens=10, pairs=25, calls=1), "padded, half of it masked"
    rows = [np.array([1, 2, 3]), np.array([1, 2, 4, 5])]
    tree = merge(rows, [1, 1])
    pieces = attention_pieces(tree)
    assert SHAPE.cost_of_tree(tree) == SHAPE.cost(tokens=5, pairs=pieces.num_pairs, calls=pieces.num_calls)
    assert [pays(tree, 1.0) for tree in (MARGIN, MARGIN + 0.01)] == [True, False]


def half_a_billion(device: str) -> ModelShape:
    return ModelShape(linear_parameters=360_000_000, num_layers=24, attention_width=896, device=device)


def test_on_cuda_blocks_are_computed_whole_and_a_pass_has_a_floor() -> None:
    shape = half_a_billion("cuda")
    tree = merge([np.array([1, 2, 3]), np.array([1, 2, 4, 5])], [1, 1])
    assert shape.cost_of_tree(tree) == RATES["cuda"].tree + shape.cost(tokens=BLOCK, pairs=BLOCK**2, calls=1)
    assert shape.cost(tokens=0, pairs=0, calls=9) == pytest.approx(24 * RATES["cuda"].layer), "whatever its calls"


@given(forests())
def test_on_cuda_too_no_tree_costs_less_than_its_least_cost(forest: list[tuple[IntArray, int]]) -> None:
    shape = half_a_billion("cuda")
    order, shared = sort_rows([row for row, _ in forest])
    rows = [forest[i][0] for i in order]
    least = shape.least_cost_of_tree(np.array([len(row) for row in rows]), shared)
    assert least <= shape.cost_of_tree(merge(rows, [1] * len(rows)))


def test_below_2000_tokens_sharing_pays_on_a_cpu_and_not_on_cuda() -> None:
    random = np.random.default_rng(0)

    def group(prompt: int, response: int) -> list[IntArray]:
        shared = random.integers(0, 500, prompt)
        return [np.concatenate((shared, random.integers(0, 500, response))) for _ in range(8)]

    def pays_on(device: str, rows: list[IntArray]) -> bool:
        shape, lengths = half_a_billion(device), np.array([len(row) for row in rows])
        return pays(shape.cost_of_tree(merge(rows, [1] * len(rows))), shape.cost_of_rows(lengths))

    small, large = group(100, 20), group(4000, 1000)
    assert [pays_on("cpu", small), pays_on("cpu", large)] == [True, True]
    assert [pays_on("cuda", small), pays_on("cuda", large)] == [False, True]


@given(lengths=st.lists(st.integers(2, 300), min_size=1, max_size=40))
def test_what_one_more_pass_costs_on_cuda_puts_rows_of_a_tiny_model_together(lengths: list[int]) -> None:
    tiny = ModelShape(linear_parameters=900_000, num_layers=3, attention_width=160, device="cuda")
    passes = plan_passes(np.array(lengths), 10**6, tiny.overhead_tokens)
    assert len(passes) == 1
