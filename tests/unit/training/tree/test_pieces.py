"""Attention calls: every visible pair once, no other outside a tile, and few of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.records import IntArray
from flexmarl.training.tree.kernels import padded_ends, visible_blocks
from flexmarl.training.tree.merge import PrefixTree, merge
from flexmarl.training.tree.pieces import Chains, attention_pieces
from tests.unit.training.tree.forests import forests

Forest = list[tuple[IntArray, int]]


def tree_of(forest: Forest) -> PrefixTree:
    return merge([row for row, _ in forest], [count for _, count in forest])


def visible(ends: np.ndarray) -> np.ndarray:
    nodes = np.arange(len(ends))
    return (nodes <= nodes[:, None]) & (nodes[:, None] < ends)


@given(forests(), st.sampled_from([1, 4, 20, 64]))
@settings(max_examples=200, deadline=None)
def test_pieces_hold_every_visible_pair_once_and_no_other(forest: Forest, tile: int) -> None:
    tree = tree_of(forest)
    pieces = attention_pieces(tree, tile)
    counted = np.zeros((tree.num_tokens, tree.num_tokens), dtype=int)
    own = np.zeros(tree.num_tokens, dtype=int)
    for piece in pieces.own:
        if isinstance(piece, Chains):
            for start in range(piece.start, piece.start + piece.count * piece.length, piece.length):
                stop = start + piece.length
                counted[start:stop, start:stop] += np.tri(piece.length, dtype=int)
                own[start:stop] += 1
        else:
            assert piece.stop - piece.start <= tile
            counted[piece.start : piece.stop, piece.start : piece.stop] += piece.visible
            own[piece.start : piece.stop] += 1
    for side in pieces.sides:
        counted[side.start : side.stop, side.seen_start : side.seen_stop] += 1
    assert (own == 1).all()
    assert (counted == visible(tree.ends)).all()


@given(forests(most=20))
@settings(max_examples=50, deadline=None)
def test_a_node_is_in_at_most_logarithmically_many_sides(forest: Forest) -> None:
    tree = tree_of(forest)
    sides = np.zeros(tree.num_tokens, dtype=int)
    for side in attention_pieces(tree, tile=1).sides:
        sides[side.start : side.stop] += 1
    assert sides.max() <= np.log2(tree.num_tokens)


def test_equal_responses_to_one_prompt_take_three_calls() -> None:
    prompt = np.zeros(400, np.int32)
    rows = [np.concatenate((prompt, np.full(100, i + 1))).astype(np.int32) for i in range(8)]
    pieces = attention_pieces(merge(rows, [100] * 8))
    assert pieces.num_calls == 3
    assert pieces.num_pairs == 500 * 501 // 2 + 7 * 100 * 101 // 2 + 700 * 400


def test_a_chain_of_calls_takes_one_call() -> None:
    row = np.arange(4000, dtype=np.int32)
    pieces = attention_pieces(merge([row[:end] for end in range(200, 4001, 50)], [20] * 77))
    assert pieces.own == (Chains(0, 4000, 1),)
    assert pieces.sides == ()


@given(forests(), st.sampled_from([1, 2, 5, 16]))
@settings(max_examples=100, deadline=None)
def test_the_block_mask_in_closed_form_is_that_of_the_dense_mask(forest: Forest, block: int) -> None:
    ends = padded_ends(tree_of(forest).ends, block)
    blocks = visible(ends).reshape(len(ends) // block, block, -1, block).swapaxes(1, 2)
    partly, fully = visible_blocks(ends, block)
    some, throughout = blocks.any((2, 3)), blocks.all((2, 3))
    assert ((partly | fully) == some).all()
    below = np.tri(len(fully), k=-1, dtype=bool)
    assert (fully == throughout & below).all()


def test_padding_sees_itself_only_and_is_seen_by_nothing() -> None:
    dense = visible(padded_ends(np.array([3, 2, 3]), 4))
    assert dense[3].tolist() == [False, False, False, True]
    assert dense[:3, 3].tolist() == [False] * 3
    assert dense[:3, :3].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
