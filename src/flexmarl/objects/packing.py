"""Decides where the tensors of a tree lie in one block of bytes: all tensors of one dtype in one contiguous buffer.

    |  bfloat16: embed | layers.0.q | ...  |  float32: layers.0.norm | ...  |

A dtype's buffer is one tensor, so a transfer between devices or nodes moves only as many tensors as there are dtypes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

ALIGNMENT = 64
"""Bytes. A cache line, and a multiple of every element's size, so that a view of any dtype may begin there."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts that decide how many bytes a tensor takes."""

    dtype: str
    """The name in torch: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_items(self) -> int:
        """Number of items: 1 for a scalar, 0 for an empty tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    """In items, from the beginning of its dtype's buffer."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """All tensors of one dtype."""

    dtype: str
    offset: int
    """In bytes, from the beginning of the block."""
    num_items: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The index of a block: enough to find every tensor again."""

    num_bytes: int
    buffers: tuple[Buffer, ...]

    def as_plain(self) -> dict[str, Any]:
        """The index as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, index: Mapping[str, Any]) -> Self:
        """The inverse of `as_plain`, also after JSON has turned the tuples into lists."""
        return cls(index["num_bytes"], tuple(_buffer(buffer) for buffer in index["buffers"]))


def plan(tensors: Mapping[str, TensorFacts]) -> Layout:
    """Places the tensors in order of dtype, then of name, each at a multiple of ALIGNMENT.

    >>> plan({"b": TensorFacts("float32", (20,), 4), "a": TensorFacts("float32", (2, 2), 4)}).buffers[0].slots
    (Slot(name='a', shape=(2, 2), start=0), Slot(name='b', shape=(20,), start=16))
    """
    end = 0
    buffers: list[Buffer] = []
    for dtype in sorted({facts.dtype for facts in tensors.values()}):
        offset = end
        slots: list[Slot] = []
        item_bytes = 1
        for name in sorted(name for name, facts in tensors.items() if facts.dtype == dtype):
            facts = tensors[name]
            item_bytes = facts.item_bytes
            slots.append(Slot(name, facts.shape, (end - offset) // item_bytes))
            end = _aligned(end + facts.num_items * item_bytes)
        buffers.append(Buffer(dtype, offset, (end - offset) // item_bytes, tuple(slots)))
    return Layout(end, tuple(buffers))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _buffer(index: Mapping[str, Any]) -> Buffer:
    slots = tuple(Slot(slot["name"], tuple(slot["shape"]), slot["start"]) for slot in index["slots"])
    return Buffer(index["dtype"], index["offset"], index["num_items"], slots)
