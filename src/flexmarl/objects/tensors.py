"""Trees of tensors on torch: laid out in one block of bytes, and digested as a whole or part by part.

All tensors of one dtype lie in one contiguous buffer, so a transfer between devices or nodes moves only as many tensors
as there are dtypes. Tensors are copied into the block once, and viewed there without copying.

    |  bfloat16: embed | layers.0.q | ...  |  float32: layers.0.norm | ...  |

The digest of a tree is that of names, dtypes and shapes, and the sums of its block's words (cluster/word_sums.py),
which add up from parts, in any order and on any device.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, Self

import numpy as np
import torch

from flexmarl.cluster.torch_device import wait_for_copies
from flexmarl.cluster.word_sums import BLOCK, MASK, WORD_BYTES, Sums, array_sums, factors_of, tables

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

    def __hash__(self) -> int:
        """Reads no names: a layout is looked up more often than made."""
        return hash((self.num_bytes, tuple((buffer.dtype, len(buffer.slots)) for buffer in self.buffers)))

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
            end = -(-(end + facts.num_items * item_bytes) // ALIGNMENT) * ALIGNMENT
        buffers.append(Buffer(dtype, offset, (end - offset) // item_bytes, tuple(slots)))
    return Layout(end, tuple(buffers))


def _buffer(index: Mapping[str, Any]) -> Buffer:
    slots = tuple(Slot(slot["name"], tuple(slot["shape"]), slot["start"]) for slot in index["slots"])
    return Buffer(index["dtype"], index["offset"], index["num_items"], slots)


def layout_of(tree: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of a tree's tensors, wherever they live."""
    return _planned(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tree.items()))


@lru_cache(maxsize=16)
def _planned(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> Layout:
    return plan(
        {
            name: TensorFacts(str(dtype).removeprefix("torch."), tuple(shape), dtype.itemsize)
            for name, dtype, shape in tensors
        }
    )


def views(layout: Layout, block: Any, offset: int = 0) -> dict[str, torch.Tensor]:
    """Views of the tensors that are laid out in a writable block from byte `offset` on. Each keeps the block alive."""
    tree: dict[str, torch.Tensor] = {}
    for buffer in layout.buffers:
        dtype = getattr(torch, buffer.dtype)
        items = torch.empty(0, dtype=dtype)
        if buffer.num_items:
            items = torch.frombuffer(block, dtype=dtype, count=buffer.num_items, offset=offset + buffer.offset)
        for slot in buffer.slots:
            tree[slot.name] = items.as_strided(slot.shape, _strides(slot.shape), slot.start)
    return tree


def separate(layout: Layout, block: Any, offset: int = 0) -> dict[str, torch.Tensor]:
    """As `views`, each with a storage of its own: files of a tensor hold its whole storage."""
    tree: dict[str, torch.Tensor] = {}
    for buffer in layout.buffers:
        dtype = getattr(torch, buffer.dtype)
        for slot in buffer.slots:
            start, items = offset + buffer.offset + slot.start * dtype.itemsize, prod(slot.shape)
            held = (
                torch.frombuffer(block, dtype=dtype, count=items, offset=start)
                if items
                else torch.empty(0, dtype=dtype)
            )
            tree[slot.name] = held.view(slot.shape)
    return tree


@lru_cache(maxsize=1 << 10)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Items from one index to the next of each dimension, as contiguous tensors have them."""
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def copy_in(tree: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Copies every tensor to its view, straight from its device. All are there when it returns."""
    devices = {tensor.device for one in (tree, into) for tensor in one.values()}
    with torch.no_grad():
        for name, view in into.items():
            view.copy_(tree[name], non_blocking=True)
    for device in devices:
        wait_for_copies(device)


_SMALL = 1 << 16
"""Items of a tensor. Smaller neighbours are joined first: a copy costs less than the dozen calls that each takes."""
_JOINED = 1 << 20
"""Most items that are joined: a copy of them is all the memory that a digest takes."""
_PIECE = 1 << 20
"""Bytes that are copied before they are summed: a few blocks, which a core's cache holds."""
_CHUNK = 64
"""Blocks that an accelerator multiplies in one go: 16 MiB of products."""


def part_sums(part: torch.Tensor, first_byte: int) -> Sums:
    """Sums of a part that begins at byte `first_byte` of the block: any tensor, computed on its own device.

    >>> whole = torch.arange(20)
    >>> part_sums(whole[:7], 0) + part_sums(whole[7:], 56) == part_sums(whole, 0)
    True
    """
    total = _Total()
    total.add(part, first_byte)
    return total.read()


def tree_sums(tree: Mapping[str, torch.Tensor], layout: Layout) -> Sums:
    """Sums of the tensors in `tree`, which may be some or all of the layout's."""
    total = _Total()
    for buffer in layout.buffers:
        slots = [slot for slot in buffer.slots if slot.name in tree]
        total.add_placed(buffer, ((slot.start, tree[slot.name].detach().reshape(-1)) for slot in slots))
    return total.read()


def copy_summed(layout: Layout, source: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> Sums:
    """Copies all tensors of the layout; returns the sums of the copies, each read while it is still in the cache.

    If one side is on an accelerator, that side is summed there, in less time than the copy takes.
    """
    for side in (source, into):
        if any(tensor.device.type != "cpu" for tensor in side.values()):
            copy_in(source, into)
            return tree_sums(side, layout)
    total = _Total()
    with torch.no_grad():
        for buffer in layout.buffers:
            total.add_placed(buffer, _copies(buffer, source, into))
    return total.read()


def _copies(
    buffer: Buffer, source: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Copies tensor after tensor, large ones piece by piece; yields each copy, flat, with its place in the buffer."""
    for slot in buffer.slots:
        here, there = source[slot.name], into[slot.name]
        items = prod(slot.shape)
        if items < _SMALL or not _in_one_row(here, there):
            there.copy_(here)
            yield slot.start, there if len(slot.shape) == 1 else there.reshape(-1)
            continue
        here, there, step = here.view(-1), there.view(-1), _PIECE // there.element_size()
        at = 0
        while at < items:
            end = min(items, at + step - (slot.start + at) % step)
            yield slot.start + at, there[at:end].copy_(here[at:end])
            at = end


def _in_one_row(*tensors: torch.Tensor) -> bool:
    """True if these are contiguous in host memory, where copying them in pieces costs nothing."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


class _Total:
    """Sums of tensors on any devices. An accelerator is given all its work first, and its sums are read at the end."""

    def __init__(self) -> None:
        self._sums = Sums()
        self._blocks: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Sums of neighbouring blocks, without their factors: number of the first block, then those of S and of T."""

    def add(self, part: torch.Tensor, first_byte: int) -> None:
        """Adds a part that begins at byte `first_byte` of the whole."""
        data = part.detach().contiguous().reshape(-1).view(torch.uint8)
        head, first = first_byte % WORD_BYTES, first_byte // WORD_BYTES
        if not len(data):
            return
        if head or data.storage_offset() % WORD_BYTES:
            self._add_words(_padded(data, head), first)
            return
        num_whole = len(data) // WORD_BYTES
        end = num_whole * WORD_BYTES
        self._add_words(data[:end].view(torch.int64), first)
        if end < len(data):
            self._add_words(_padded(data[end:], 0), first + num_whole)

    def add_placed(self, buffer: Buffer, placed: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Adds flat tensors of a buffer, given in order of place."""
        for start, run in _runs(placed):
            together = torch.cat(run) if len(run) > 1 else run[0]
            self.add(together, buffer.offset + start * together.element_size())

    def read(self) -> Sums:
        """The sums of all that was added."""
        for device in {of_words.device for _, of_words, _ in self._blocks}:
            here = [blocks for blocks in self._blocks if blocks[1].device == device]
            of_blocks = torch.stack([torch.cat(sums) for sums in ([b[1] for b in here], [b[2] for b in here])]).cpu()
            factors = [factors_of(first, len(of_words)) for first, of_words, _ in here]
            words, upper = (
                int(np.dot(sums.numpy(), np.concatenate(of)))
                for sums, of in zip(of_blocks, zip(*factors, strict=True), strict=True)
            )
            self._sums += Sums(words & MASK, upper & MASK)
        self._blocks.clear()
        return self._sums

    def _add_words(self, words: torch.Tensor, first: int) -> None:
        if words.device.type == "cpu":
            self._sums += array_sums(words.numpy(), first)
        else:
            self._add_blocks(words, first)

    def _add_blocks(self, words: torch.Tensor, first: int) -> None:
        table, upper_table = _tables(words.device)
        at = 0
        while at < len(words):
            block, start = divmod(first + at, BLOCK)
            whole = (len(words) - at) // BLOCK if start == 0 else 0
            number = min(whole, _CHUNK)
            size = number * BLOCK if number else min(BLOCK - start, len(words) - at)
            piece = words[at : at + size].view(max(number, 1), -1)
            here = slice(start, start + piece.shape[1])
            self._blocks.append((block, (piece * table[here]).sum(1), ((piece >> 32) * upper_table[here]).sum(1)))
            at += size


@lru_cache(maxsize=64)
def facts_digest(layout: Layout) -> str:
    """64-bit BLAKE2b over names, dtypes and shapes, in hex."""
    facts = [[buffer.dtype, [[slot.name, slot.shape] for slot in buffer.slots]] for buffer in layout.buffers]
    return blake2b(json.dumps(facts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def whole_digest(layout: Layout, sums: Sums) -> str:
    """The digest of a tree with this layout and these sums: `{facts}:{sums}`, in hex."""
    return f"{facts_digest(layout)}:{sums.words:016x}{sums.upper:016x}"


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (torch.from_numpy(table).to(device) for table in tables())
    return first, second


def _runs(placed: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Joins flat tensors, given in order of place, into runs (place, tensors): small neighbours, with zeros between."""
    run: list[torch.Tensor] = []
    start = end = 0
    for place, tensor in placed:
        gap, number = place - end, tensor.shape[0]
        small = number < _SMALL
        if run and (not small or gap >= ALIGNMENT or tensor.device != run[0].device or end - start >= _JOINED):
            yield start, run
            run = []
        if not small:
            yield place, [tensor]
            continue
        if not run:
            start = place
        elif gap:
            run.append(tensor.new_zeros(gap))
        run.append(tensor)
        end = place + number
    if run:
        yield start, run


def _padded(data: torch.Tensor, head: int) -> torch.Tensor:
    """The bytes as words, after `head` zero bytes and followed by the zero bytes that the last word needs."""
    num_words = -(-(head + len(data)) // WORD_BYTES)
    words = torch.zeros(num_words, dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[head : head + len(data)] = data
    return words
