"""Trees of tensors on torch: laid out in one block of bytes, and digested as a whole or part by part.

All tensors of one dtype lie in one contiguous buffer, so a transfer between devices or nodes moves only as many tensors
as there are dtypes. Tensors are copied into the block once, and viewed there without copying.

    |  bfloat16: embed | layers.0.q | ...  |  float32: layers.0.norm | ...  |

The digest of a tree adds up from parts, in any order and on any device:

    block of the layout:  | w0 | w1 | w2 | ...        64-bit words, little-endian; padding is zero
    sums                  S = sum of w[p] c[p]         mod 2^64, c[p] odd
                          T = sum of (w[p] >> 32) d[p] mod 2^64, d[p] odd, w signed
    coefficients          c[p] = table[p mod BLOCK] factor[p div BLOCK], d alike

Both sums are linear in the bytes, so the sums of parts add up to those of the whole, whoever computed them. A change of
one word always changes S, as c[p] is odd. T is needed because a word's highest bits meet only the lowest bits of c in
S: with S alone, two flipped signs could cancel. Two changes cancel in both sums with a probability of 2^-32 at most;
for a torn, stale or swapped tensor it is 2^-64 or less. The digest is not cryptographic: two trees with the same digest
can be made on purpose.
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
            end = _aligned(end + facts.num_items * item_bytes)
        buffers.append(Buffer(dtype, offset, (end - offset) // item_bytes, tuple(slots)))
    return Layout(end, tuple(buffers))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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


@lru_cache(maxsize=1 << 10)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Items from one index to the next of each dimension, as contiguous tensors have them."""
    return tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def copy_in(tree: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Copies every tensor to its view, straight from its device. The copies are contiguous."""
    with torch.no_grad():
        for name, view in into.items():
            view.copy_(tree[name])


BLOCK = 1 << 15
"""Words that share a factor. Their coefficients, 256 KiB for each sum, stay in a core's cache. Fewer would need more
calls."""
_SMALL = 1 << 16
"""Items of a tensor. Smaller neighbours are joined first: a copy costs less than the dozen calls that each takes."""
_JOINED = 1 << 20
"""Most items that are joined: a copy of them is all the memory that a digest takes."""
_PIECE = 1 << 20
"""Bytes that are copied before they are summed: a few blocks, which a core's cache holds."""
_CHUNK = 64
"""Blocks that an accelerator multiplies in one go: 16 MiB of products."""
_MASK = (1 << 64) - 1
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sums:
    """The two sums, S and T, of a part of a block. The sums of disjoint parts add up."""

    words: int = 0
    upper: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums((self.words + other.words) & _MASK, (self.upper + other.upper) & _MASK)


def part_sums(part: torch.Tensor, first_byte: int) -> Sums:
    """Sums of a part that begins at byte `first_byte` of the block: any tensor, computed on its own device.

    >>> whole = torch.arange(20)
    >>> part_sums(whole[:7], 0) + part_sums(whole[7:], 56) == part_sums(whole, 0)
    True
    """
    data = part.detach().contiguous().reshape(-1).view(torch.uint8)
    if not len(data):
        return Sums()
    head = first_byte % _WORD_BYTES
    if head or data.storage_offset() % _WORD_BYTES:
        return _sums(_padded(data, head), first_byte // _WORD_BYTES)
    first, num_whole = first_byte // _WORD_BYTES, len(data) // _WORD_BYTES
    end = num_whole * _WORD_BYTES
    sums = _sums(data[:end].view(torch.int64), first)
    return sums if end == len(data) else sums + _sums(_padded(data[end:], 0), first + num_whole)


def tree_sums(tree: Mapping[str, torch.Tensor], layout: Layout) -> Sums:
    """Sums of the tensors in `tree`, which may be some or all of the layout's."""
    sums = Sums()
    for buffer in layout.buffers:
        slots = [slot for slot in buffer.slots if slot.name in tree]
        sums += _placed_sums(buffer, ((slot.start, tree[slot.name].detach().reshape(-1)) for slot in slots))
    return sums


def copy_summed(layout: Layout, source: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> Sums:
    """Copies all tensors of the layout; returns the sums of the copies, each read while it is still in the cache."""
    with torch.no_grad():
        return sum((_placed_sums(buffer, _copies(buffer, source, into)) for buffer in layout.buffers), Sums())


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


def _placed_sums(buffer: Buffer, placed: Iterable[tuple[int, torch.Tensor]]) -> Sums:
    """Sums of flat tensors of a buffer, given in order of place."""
    sums = Sums()
    for start, run in _runs(placed):
        together = torch.cat(run) if len(run) > 1 else run[0]
        sums += part_sums(together, buffer.offset + start * together.element_size())
    return sums


@lru_cache(maxsize=64)
def facts_digest(layout: Layout) -> str:
    """64-bit BLAKE2b over names, dtypes and shapes, in hex."""
    facts = [[buffer.dtype, [[slot.name, slot.shape] for slot in buffer.slots]] for buffer in layout.buffers]
    return blake2b(json.dumps(facts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def whole_digest(layout: Layout, sums: Sums) -> str:
    """The digest of a tree with this layout and these sums: `{facts}:{sums}`, in hex."""
    return f"{facts_digest(layout)}:{sums.words:016x}{sums.upper:016x}"


def coefficients(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c and d of the words at these positions of a block, in uint64: the definition, for tests and other code."""
    within, block = positions.astype(np.uint64) % np.uint64(BLOCK), positions.astype(np.uint64) // np.uint64(BLOCK)
    return _odd_factor(within, 0) * _odd_factor(block, 2), _odd_factor(within, 1) * _odd_factor(block, 3)


def _odd_factor(index: np.ndarray, stream: int) -> np.ndarray:
    """Odd 64-bit numbers: splitmix64 (Steele et al. 2014) at the places `index` of one of four streams."""
    with np.errstate(over="ignore"):
        z = (index.astype(np.uint64) + np.uint64(stream << 40) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    within = np.arange(BLOCK)
    first, second = (torch.from_numpy(_odd_factor(within, stream).view(np.int64)).to(device) for stream in (0, 1))
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


@lru_cache(maxsize=1 << 12)
def _block_factors(block: int) -> tuple[int, int]:
    (factor,), (upper_factor,) = _factors(block, 1)
    return int(factor), int(upper_factor)


def _factors(first: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.arange(first, first + number)
    return _odd_factor(blocks, 2).view(np.int64), _odd_factor(blocks, 3).view(np.int64)


def _padded(data: torch.Tensor, head: int) -> torch.Tensor:
    """The bytes as words, after `head` zero bytes and followed by the zero bytes that the last word needs."""
    num_words = -(-(head + len(data)) // _WORD_BYTES)
    words = torch.zeros(num_words, dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[head : head + len(data)] = data
    return words


def _sums(words: torch.Tensor, first: int) -> Sums:
    return _block_by_block(words, first) if words.device.type == "cpu" else _many_blocks(words, first)


def _block_by_block(words: torch.Tensor, first: int) -> Sums:
    """The sums on a CPU: each block is read into the cache once, and multiplied there twice."""
    table, upper_table = (table.numpy() for table in _tables(words.device))
    array = words.numpy()
    upper = np.empty(min(BLOCK, len(array)), np.int64)
    sums, at = [0, 0], 0
    while at < len(array):
        block, start = divmod(first + at, BLOCK)
        size = min(BLOCK - start, len(array) - at)
        piece, halves = array[at : at + size], upper[:size]
        np.right_shift(piece, 32, out=halves)
        factor, upper_factor = _block_factors(block)
        # numpy's loop over 64-bit integers is half as long as that of `torch.dot`.
        sums[0] += factor * int(np.einsum("i,i", piece, table[start : start + size]))
        sums[1] += upper_factor * int(np.einsum("i,i", halves, upper_table[start : start + size]))
        at += size
    return Sums(sums[0] & _MASK, sums[1] & _MASK)


def _many_blocks(words: torch.Tensor, first: int) -> Sums:
    """The sums on an accelerator: few large kernels, and no number is read back before the end."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    tables, at = _tables(words.device), 0
    while at < len(words):
        block, start = divmod(first + at, BLOCK)
        whole = (len(words) - at) // BLOCK if start == 0 else 0
        number = min(whole, _CHUNK)
        size = number * BLOCK if number else min(BLOCK - start, len(words) - at)
        piece = words[at : at + size].view(max(number, 1), -1)
        factors = _factors(block, max(number, 1))
        for which, values in enumerate((piece, piece >> 32)):
            table = tables[which][start : start + piece.shape[1]]
            total[which] += ((values * table).sum(1) * torch.from_numpy(factors[which]).to(words.device)).sum()
        at += size
    return Sums(*(int(number) & _MASK for number in total.tolist()))
