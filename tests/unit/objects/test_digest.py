"""The digest: additive over any split, the same on any path and as its closed form, and blind to no single change."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.cluster.word_sums import BLOCK, Sums, _odd_factor, array_sums
from flexmarl.objects import tensors
from flexmarl.objects.interface import Checksum, checksum, confirms, names_checksum
from flexmarl.objects.settings import ObjectSettings
from flexmarl.objects.tensors import (
    copy_in,
    layout_of,
    part_sums,
    tree_sums,
    views,
    whole_digest,
)
from flexmarl.testing.object_checks import heterogeneous_tree

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64)


def random_bytes(number: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, number, dtype=np.uint8))


def coefficients(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c and d of the words at these positions of a block, in uint64."""
    within, block = positions.astype(np.uint64) % np.uint64(BLOCK), positions.astype(np.uint64) // np.uint64(BLOCK)
    return _odd_factor(within, 0) * _odd_factor(block, 2), _odd_factor(within, 1) * _odd_factor(block, 3)


def closed_form(data: np.ndarray, first_word: int = 0) -> Sums:
    """The definition, in numpy, of bytes that begin with a word."""
    words = np.pad(data, (0, -len(data) % 8)).view(np.int64)
    c, d = coefficients(np.arange(first_word, first_word + len(words)))
    whole, upper = (words.view(np.uint64) * c).sum(dtype=np.uint64), ((words >> 32).view(np.uint64) * d).sum()
    return Sums(int(whole), int(upper))


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 13, 8 * 2 * BLOCK + 4])
@pytest.mark.parametrize("first_word", [0, 5, BLOCK - 1, 3 * BLOCK])
def test_it_is_its_closed_form(number: int, first_word: int) -> None:
    data = random_bytes(number)
    assert part_sums(data, 8 * first_word) == closed_form(data.numpy(), first_word)


def test_what_an_accelerator_computes_is_what_a_processor_computes() -> None:
    for number in (0, 3, BLOCK, 66 * BLOCK + 5):
        words = torch.randint(-(2**63), 2**63 - 1, (number,))
        for first in (0, 7, 2 * BLOCK):
            total = tensors._Total()
            for part in (words[:7], words[7:]):
                total._add_blocks(part, first)
                first += len(part)
            assert total.read() == array_sums(words.numpy(), first - number)


@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=5), st.integers(0, 40), st.randoms())
def test_parts_add_up_however_it_is_split_and_in_whatever_order(number, cuts, first_byte, random) -> None:
    data = random_bytes(number, seed=number)
    ends = [0, *sorted(cut % (number + 1) for cut in cuts), number]
    parts = [part_sums(data[a:b], first_byte + a) for a, b in pairwise(ends)]
    random.shuffle(parts)
    assert sum(parts, start=Sums()) == part_sums(data, first_byte)


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 300), st.data())
def test_a_change_of_any_bit_is_seen(seed, dtype, number, data) -> None:
    raw = random_bytes(number * torch.empty(0, dtype=dtype).element_size(), seed)
    flipped = raw.clone()
    flipped[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum({"w": raw.view(dtype)}) != checksum({"w": flipped.view(dtype)})


@given(st.integers(0, 2**32), st.integers(2, 200), st.data())
def test_two_values_that_change_places_or_signs_are_seen(seed, number, data) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, number).astype(np.float32))
    one, other = (data.draw(st.integers(0, number - 1)) for _ in range(2))
    swapped, signs = values.clone(), values.clone()
    swapped[one], swapped[other] = values[other], values[one]
    signs.view(torch.int32)[[one, other]] ^= -(2**31)
    for changed in (swapped, signs):
        same_bytes = torch.equal(changed.view(torch.int32), values.view(torch.int32))
        assert (checksum({"w": changed}) == checksum({"w": values})) == same_bytes


def test_all_values_one_place_further_are_seen() -> None:
    values = torch.randn(100_000)
    assert checksum({"w": values}) != checksum({"w": values.roll(1)})
    assert checksum({"w": values}) != checksum({"w": values.roll(8 * BLOCK)})
    assert checksum({"w": values}) != checksum({"w": -values})


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(6)},
        {"w": torch.zeros(2, 3)},
        {"w": torch.zeros(6, dtype=torch.int32)},
        {"w": torch.zeros(7)},
        {"w": torch.zeros(6), "x": torch.zeros(0)},
        {},
    ],
    ids=("name", "shape", "dtype", "length", "another", "nothing"),
)
def test_a_change_of_name_shape_or_dtype_is_seen(other: dict[str, torch.Tensor]) -> None:
    tree = {"w": torch.zeros(6)}
    assert checksum(tree) != checksum(other)
    assert names_checksum(tree) != names_checksum(other)


def test_tensors_that_change_names_are_seen() -> None:
    a, b = torch.randn(50), torch.randn(50)
    assert checksum({"a": a, "b": b}) != checksum({"a": b, "b": a})


def test_it_is_that_of_the_values_wherever_and_however_they_lie() -> None:
    tree = heterogeneous_tree()
    layout = layout_of(tree)
    block = bytearray(layout.num_bytes + 64)
    copy_in(tree, views(layout, block, 64))
    packed = torch.frombuffer(block, dtype=torch.uint8, count=layout.num_bytes, offset=64)
    assert checksum(tree) == checksum(views(layout, block, 64)) == whole_digest(layout, part_sums(packed, 0))
    assert checksum(dict(reversed(tree.items()))) == checksum(tree)


def test_tensors_that_are_joined_have_the_digest_of_the_whole_block_however_many_they_are() -> None:
    rng = torch.Generator().manual_seed(3)
    sizes = [
        tensors._SMALL - 1,
        7,
        tensors._SMALL,
        5,
        1,
        *[tensors._SMALL // 2 + 3] * (3 * tensors._JOINED // tensors._SMALL),
    ]
    tree = {f"{index:03}": torch.randn(size, generator=rng) for index, size in enumerate(sizes)}
    layout = layout_of(tree)
    runs = list(tensors._runs([(slot.start, tree[slot.name]) for slot in layout.buffers[0].slots]))
    assert max(len(run) for _, run in runs) > 2
    assert max(sum(map(len, run)) for _, run in runs) <= tensors._JOINED + tensors._SMALL
    block = bytearray(layout.num_bytes)
    copy_in(tree, views(layout, block))
    packed = torch.frombuffer(block, dtype=torch.uint8)
    assert checksum(tree) == whole_digest(layout, part_sums(packed, 0))


@given(st.lists(st.booleans(), min_size=1, max_size=len(heterogeneous_tree())))
def test_ranks_that_hold_some_tensors_each_add_up(mine: list[bool]) -> None:
    tree = heterogeneous_tree()
    layout = layout_of(tree)
    ranks: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (name, tensor) in enumerate(tree.items()):
        ranks[mine[number % len(mine)]][name] = tensor
    total = tree_sums(ranks[0], layout) + tree_sums(ranks[1], layout)
    assert whole_digest(layout, total) == checksum(tree)


def test_who_vouches_for_names_alone_vouches_for_any_values_under_them() -> None:
    zeros, ones, others = {"w": torch.zeros(3)}, {"w": torch.ones(3)}, {"v": torch.ones(3)}
    assert confirms(checksum(zeros), checksum(zeros))
    assert not confirms(checksum(zeros), checksum(ones))
    assert confirms(names_checksum(zeros), checksum(ones))
    assert not confirms(names_checksum(others), checksum(ones))
    assert not confirms(Checksum(""), checksum(ones))


def test_engines_on_a_cpu_check_every_byte_unless_told_otherwise() -> None:
    assert ObjectSettings().level("cpu") == "full"
    assert ObjectSettings().level("cuda:1") == "names"
    assert ObjectSettings(verify="full").level("cuda") == "full"
    assert ObjectSettings(verify="names").level("cpu") == "names"
