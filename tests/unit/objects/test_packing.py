"""Where tensors lie in one block."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.objects.interface import checksum
from flexmarl.objects.tensors import ALIGNMENT, Layout, Slot, TensorFacts, copy_in, layout_of, plan, views
from flexmarl.testing.object_checks import heterogeneous_tree

SIZES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
FACTS = st.builds(
    lambda dtype, shape: TensorFacts(dtype, tuple(shape), SIZES[dtype]),
    st.sampled_from(sorted(SIZES)),
    st.lists(st.integers(0, 40), max_size=3),
)


def packed(tree):
    layout = layout_of(tree)
    held = views(layout, bytearray(layout.num_bytes + 64), 64)
    copy_in(tree, held)
    return held


def test_each_dtype_has_one_buffer_with_its_tensors_in_the_order_of_their_names():
    layout = plan(
        {
            "b": TensorFacts("float32", (20,), 4),
            "a": TensorFacts("float32", (2, 2), 4),
            "c": TensorFacts("bfloat16", (3,), 2),
        }
    )
    half, single = layout.buffers
    assert (half.dtype, half.offset, half.num_items, half.slots) == ("bfloat16", 0, 32, (Slot("c", (3,), 0),))
    assert (single.dtype, single.offset, single.num_items) == ("float32", 64, 48)
    assert single.slots == (Slot("a", (2, 2), 0), Slot("b", (20,), 16))
    assert layout.num_bytes == 256


@given(st.dictionaries(st.text(max_size=5), FACTS, max_size=20))
def test_no_two_tensors_share_a_byte_and_all_are_aligned(facts):
    layout = plan(facts)
    end = 0
    for buffer in layout.buffers:
        assert buffer.offset == end, "buffers follow one another"
        for slot in buffer.slots:
            item = facts[slot.name].item_bytes
            begin = buffer.offset + slot.start * item
            assert begin % ALIGNMENT == 0
            assert begin >= end
            end = begin + facts[slot.name].num_items * item
        end = buffer.offset + buffer.num_items * SIZES[buffer.dtype]
    assert layout.num_bytes == end
    assert {slot.name: (b.dtype, slot.shape) for b in layout.buffers for slot in b.slots} == {
        name: (one.dtype, one.shape) for name, one in facts.items()
    }
    assert Layout.from_plain(json.loads(json.dumps(layout.as_plain()))) == layout


def test_packed_tensors_are_views_of_one_buffer_per_dtype():
    tree = {"a": torch.ones(3), "b": torch.zeros(2, 2), "c": torch.ones(5, dtype=torch.bfloat16)}
    held = packed(tree)
    assert held["a"].untyped_storage().data_ptr() == held["b"].untyped_storage().data_ptr()
    assert held["a"].untyped_storage().data_ptr() != held["c"].untyped_storage().data_ptr()
    assert all(tensor.is_contiguous() for tensor in held.values())


def test_a_packed_tree_has_the_checksum_of_the_tree():
    tree = heterogeneous_tree()
    assert checksum(packed(tree)) == checksum(tree)
