"""Cache of keys and values in blocks, on a transformers `Cache`, and the attention that reads it.

A layer is a pool of N blocks with room for B tokens each; a sequence's table lists its blocks in order of position. The
pool grows by doubling as higher blocks are taken. Attention gathers a batch's blocks, one layer at a time, so that next
to the pool there is at most one layer's copy of what is read.

One forward pass packs all its tokens into a batch of one: first the next token of every active row, longest row first,
then the joiners' prompts, one after the other. Only attention knows where each sequence ends.

    tokens   | longest row | ... | shortest row | prompt of a joiner .... | prompt of the next .... |
              `----- decode: 1 each ----------'   `--- prefill: padded to the longest, masked -----'

Letters: N blocks, B tokens per block, T packed tokens, J joiners, M the longest of them, H heads, K key heads, D head
size, L positions that are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from flexmarl.errors import ConfigError, EngineError
from flexmarl.records import IntArray

ATTENTION = "flexmarl_blocks"
"""The name under which transformers finds `block_attention`."""
PAD, SCRATCH, FIRST = 0, 1, 2
"""Block of zeros that tables end with, block that rows without a request write to, and the first that requests get."""
Integers = NDArray[np.integer]
_GROUP_GAIN = 1024
"""Rows are read in another group if that spares this many positions. Below, the extra calls cost more."""
_GATHERED_BYTES = 32 << 20
"""Most bytes of keys that are gathered at a time. Larger ones are fresh pages of the system at every call."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """A prompt that enters a row. Positions from `start` on are computed; earlier ones are in the cache already."""

    row: int
    start: int
    ids: IntArray
    """The whole prompt."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring rows that are read up to the same position."""

    rows: slice
    blocks: torch.Tensor
    """[rows * K * blocks per row] index of each block of each key head in the pool's [N * K]."""
    bias: torch.Tensor
    """[rows, 1, 1, L]; 0 where a row has a key, -inf after its end."""
    fused: bool
    """False if plain products read the keys: on a CPU in float32 they are quicker than the fused kernel."""
    padded: torch.Tensor | None
    """[2, rows, K, L, D] memory in which keys and values are read, if L is fixed; else L is what `blocks` hold."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """The joiners of one forward pass."""

    blocks: torch.Tensor
    """[J * K * blocks per joiner], as in `DecodeGroup`."""
    num_joiners: int
    kv_length: int
    width: int
    """M: tokens of the longest joiner."""
    place: torch.Tensor
    """[prompt tokens] index of each token in the padded [J * M]."""
    bias: torch.Tensor | None
    """[J, 1, M, L]; None for a single prompt that is computed from its first token: it is simply causal."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The layout of one forward pass."""

    input_ids: torch.Tensor
    """[1, T]."""
    position_ids: torch.Tensor
    """[1, T]."""
    write_at: torch.Tensor
    """[K * T] flat index ((block * K + head) * B + position in it) for each token's key and value, head by head."""
    num_decode: int
    decode: Sequence[DecodeGroup]
    prefill: PrefillGroup | None
    logits_at: torch.Tensor | int
    """[n + J] tokens that need logits: every decode token and the last token of each prompt; 0 means all tokens."""


class _BlockLayer(CacheLayerMixin):
    """Keys and values of one layer, each [N, K, B, D]. The model's attention module calls `update`."""

    def __init__(self, owner: "BlockCache", pool: torch.Tensor) -> None:
        super().__init__()
        self._owner = owner
        self.is_initialized = True
        self.place(pool)

    def place(self, pool: torch.Tensor) -> None:
        """Makes this the layer's memory, [2, N, K, B, D]."""
        self.pool = pool
        self.keys, self.values = pool[0], pool[1]
        self._flat_keys, self._flat_values = pool.flatten(1, 3)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the packed [1, K, T, D] tokens where the plan says; returns all blocks, [N, K, B, D]."""
        assert self._owner.plan is not None, "the core lays out every forward"
        where = self._owner.plan.write_at
        self._flat_keys.index_copy_(0, where, key_states.reshape(-1, key_states.shape[-1]))
        self._flat_values.index_copy_(0, where, value_states.reshape(-1, value_states.shape[-1]))
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the core reserves blocks before a forward pass."""

    def get_seq_length(self) -> int:
        """Always 0, because positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """The positions of all blocks."""
        return self._flat_keys.shape[0] // self.pool.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never used: transformers calls it to build masks, and none is built here."""
        return query_length, 0


class BlockCache(Cache):
    """The pools of all layers, which have the same blocks."""

    plan: CachePlan | None = None
    """The plan of the forward pass that is being computed."""

    def __init__(self, model: torch.nn.Module, block: int, max_len: int, number: int) -> None:
        """Holds at most `number` blocks of `block` tokens, PAD and SCRATCH included. A row has `max_len` positions."""
        layers, self._key_heads, self._head_size = attention_shape(model)
        parameter = next(model.parameters())
        self.max_len = max_len
        self._block, self._number = block, number
        self._device, self._dtype = parameter.device, parameter.dtype
        self._on_cpu = self._device.type == "cpu"
        self._heads = np.arange(self._key_heads)
        self._steps = torch.arange(-(-max_len // block) * block, device=self._device)
        self._zero = torch.zeros((), dtype=self._dtype, device=self._device)
        self._masked = torch.full_like(self._zero, -torch.inf)
        self._set_aside: list[int] = []
        self._padded: torch.Tensor | None = None
        super().__init__(layers=[_BlockLayer(self, self._zeros(FIRST)) for _ in range(layers)])

    @property
    def _pools(self) -> list[torch.Tensor]:
        return [layer.pool for layer in self.layers if isinstance(layer, _BlockLayer)]

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values that are allocated now, for all layers."""
        return sum(pool.nbytes for pool in self._pools)

    def reserve(self, top: int) -> None:
        """Makes room for the blocks below `top`, layer by layer: only one layer is held twice while it is copied."""
        held = self._pools[0].shape[1]
        if top > held:
            self._rebuild(min(max(2 * held, top), self._number), list(range(held)))

    def set_aside(self, blocks: list[int]) -> None:
        """Frees the device. Keeps these blocks in host memory."""
        self.plan = self._padded = None
        self._set_aside = blocks
        for layer, pool in zip(self.layers, self._pools, strict=True):
            assert isinstance(layer, _BlockLayer)
            layer.place(pool[:, blocks].to("cpu", copy=True))

    def bring_back(self) -> None:
        """Makes the pools on the device again, with the blocks that were kept."""
        self._rebuild(max([FIRST, *(block + 1 for block in self._set_aside)]), self._set_aside)

    def _rebuild(self, number: int, blocks: list[int]) -> None:
        """Makes pools of `number` blocks; what the present pools hold goes to `blocks`, in this order."""
        for layer, pool in zip(self.layers, self._pools, strict=True):
            assert isinstance(layer, _BlockLayer)
            new = self._zeros(number)
            if blocks == list(range(len(blocks))):
                new[:, : len(blocks)] = pool
            else:
                new[:, blocks] = pool.to(self._device)
            layer.place(new)

    def _zeros(self, number: int) -> torch.Tensor:
        """A zeroed pool. Masked positions are read with weight 0, and in unset memory 0 times a NaN would be NaN."""
        shape = (2, number, self._key_heads, self._block, self._head_size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks in all layers, each (source, target); what was in a source before is what its target gets."""
        if not pairs:
            return
        sources, targets = (list(blocks) for blocks in zip(*pairs, strict=True))
        for pool in self._pools:
            pool[:, targets] = pool[:, sources]

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks that hold non-finite numbers, and forgets what was read of them."""
        self.plan = self._padded = None
        for pool in self._pools:
            pool[:, blocks] = 0

    def lay_out(
        self, last_ids: Integers, lengths: Integers, tables: Integers, joiners: Sequence[Joiner], fixed_kv: bool
    ) -> CachePlan:
        """Plans one forward pass: decode row r gets `last_ids[r]` at position `lengths[r]`, then come the joiners.

        `tables` has the blocks of the decode rows and of the joiners, padded with PAD. Decode rows are in order of
        length, the longest first. With `fixed_kv` the order does not matter: each row is read up to `max_len`.
        """
        num_decode = len(last_ids)
        fresh = [joiner.ids[joiner.start :] for joiner in joiners]
        sizes = [len(part) for part in fresh]
        rows, positions, ids = np.arange(num_decode), lengths, last_ids
        logits_at: torch.Tensor | int = 0
        if joiners:
            rows = np.concatenate([rows, np.repeat(np.arange(num_decode, len(tables)), sizes)])
            positions = np.concatenate([lengths, *(np.arange(joiner.start, len(joiner.ids)) for joiner in joiners)])
            ids = np.concatenate([last_ids, *fresh])
            logits_at = self._tensor(np.concatenate([np.arange(num_decode), num_decode - 1 + np.cumsum(sizes)]))
        blocks, places = tables[rows, positions // self._block], positions % self._block
        write_at = (blocks * self._key_heads + self._heads[:, None]) * self._block + places
        return CachePlan(
            input_ids=self._tensor(ids)[None],
            position_ids=self._tensor(positions)[None],
            write_at=self._tensor(write_at.reshape(-1)),
            num_decode=num_decode,
            decode=self._decode_groups(lengths, tables[:num_decode], fixed_kv) if num_decode else (),
            prefill=self._prefill_group(joiners, sizes, tables[num_decode:]) if joiners else None,
            logits_at=logits_at,
        )

    def _decode_groups(self, lengths: Integers, tables: Integers, fixed_kv: bool) -> list[DecodeGroup]:
        num_rows, block = len(lengths), self._block
        position_bytes = self._key_heads * self._head_size * self._zero.element_size()
        if fixed_kv:
            groups = [(slice(0, num_rows), int(lengths.max()) // block * block + block)]
        else:
            groups = row_groups(lengths, block, _GATHERED_BYTES // position_bytes)
        fused = fixed_kv or not self._on_cpu or self._dtype != torch.float32
        padded = self._padding(num_rows) if fixed_kv else None
        ends = self._tensor(lengths)[:, None]
        return [
            DecodeGroup(
                rows,
                self._gathered(tables[rows], length),
                torch.where(
                    self._steps[: self.max_len if fixed_kv else length] <= ends[rows], self._zero, self._masked
                )[:, None, None],
                fused,
                padded,
            )
            for rows, length in groups
        ]

    def _padding(self, num_rows: int) -> torch.Tensor:
        """Memory for reading a layer up to `max_len`. What past reads left in it is finite, and masked."""
        if self._padded is None:
            shape = (2, num_rows, self._key_heads, self.max_len, self._head_size)
            self._padded = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return self._padded

    def _prefill_group(self, joiners: Sequence[Joiner], sizes: list[int], tables: Integers) -> PrefillGroup:
        width, kv_length = max(sizes), max(len(joiner.ids) for joiner in joiners)
        place = np.concatenate([index * width + np.arange(size) for index, size in enumerate(sizes)])
        bias = None
        if len(joiners) > 1 or joiners[0].start > 0:
            starts = self._tensor(np.array([joiner.start for joiner in joiners]))
            ends = starts[:, None, None, None] + self._steps[:width, None]
            bias = torch.where(self._steps[:kv_length] <= ends, self._zero, self._masked)
        blocks = self._gathered(tables, kv_length)
        return PrefillGroup(blocks, len(joiners), kv_length, width, self._tensor(place), bias)

    def _gathered(self, tables: Integers, length: int) -> torch.Tensor:
        """Index in [N * K] of every block that holds one of the first `length` positions, for each row and key head."""
        blocks = tables[:, None, : -(-length // self._block)]
        return self._tensor((blocks * self._key_heads + self._heads[:, None]).reshape(-1))

    def _tensor(self, values: Integers) -> torch.Tensor:
        tensor = torch.from_numpy(values if values.dtype == np.int64 else values.astype(np.int64))
        return tensor if self._on_cpu else tensor.to(self._device, non_blocking=True)


def row_groups(lengths: Integers, block: int, most: int) -> list[tuple[slice, int]]:
    """Cuts rows into groups of neighbours, each read up to a common position, a multiple of `block`.

    `lengths` descend. A cut spares many positions, or keeps a group of several rows within `most` positions.

    >>> row_groups(np.array([30, 7, 5]), 16, 1024)
    [(slice(0, 3, None), 32)]
    """
    tops = lengths // block * block + block
    groups: list[tuple[slice, int]] = []
    start, num_rows = 0, len(lengths)
    while start < num_rows:
        top = int(tops[start])
        after = np.arange(start + 1, num_rows)
        cuts = after[((num_rows - after) * (top - tops[after]) >= _GROUP_GAIN) | ((after - start + 1) * top > most)]
        end = int(cuts[0]) if len(cuts) else num_rows
        groups.append((slice(start, end), top))
        start = end
    return groups


def block_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache_plan: CachePlan | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of the packed queries [1, H, T, D] over the pool's blocks [N, K, B, D]; returns [1, T, H, D]."""
    if cache_plan is None:
        raise EngineError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sliding_window", "position_bias")):
        raise EngineError(f"{type(module).__name__} wants more than plain full attention, which blocks do not have")
    tokens = query[0].transpose(0, 1)
    num_decode = cache_plan.num_decode
    parts = [_decode(tokens, key, value, group, scaling) for group in cache_plan.decode]
    if cache_plan.prefill is not None:
        parts.append(_prefill(tokens[num_decode:], key, value, cache_plan.prefill, scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(
    tokens: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: DecodeGroup, scaling: float | None
) -> torch.Tensor:
    """Attention of one query per row. The H / K heads of a key head take the place of queries: no key is repeated."""
    query = tokens[group.rows]
    num_rows, num_heads, size = query.shape
    keys, values = (_gather(pool, group.blocks, num_rows) for pool in (key, value))
    if group.padded is not None:
        length = min(keys.shape[2], group.padded.shape[3])
        for part, read in zip(group.padded, (keys, values), strict=True):
            part[:, :, :length] = read[:, :, :length]
        keys, values = group.padded
    grouped = query.reshape(num_rows, keys.shape[1], -1, size)
    if group.fused:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.bias, scale=scaling)
    else:
        scores = torch.matmul(grouped * (scaling or size**-0.5), keys.transpose(2, 3)).add_(group.bias)
        out = torch.matmul(torch.softmax(scores, -1), values)
    return out.reshape(num_rows, num_heads, size)


def _prefill(
    tokens: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: PrefillGroup, scaling: float | None
) -> torch.Tensor:
    _, num_heads, size = tokens.shape
    length, number = group.kv_length, group.num_joiners
    keys, values = (_gather(pool, group.blocks, number)[:, :, :length] for pool in (key, value))
    gqa = keys.shape[1] != num_heads
    if group.bias is None:
        query = tokens.transpose(0, 1)[None]
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    padded = tokens.new_zeros(group.num_joiners * group.width, num_heads, size).index_copy_(0, group.place, tokens)
    query = padded.view(group.num_joiners, group.width, num_heads, size).transpose(1, 2)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=group.bias, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(-1, num_heads, size)[group.place]


def _gather(pool: torch.Tensor, blocks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Copies these blocks [rows * K * blocks per row] of the pool [N, K, B, D]: [rows, K, positions, D]."""
    _, key_heads, _, size = pool.shape
    found = pool.flatten(0, 1).flatten(1).index_select(0, blocks)
    return found.view(num_rows, key_heads, -1, size)


def attention_shape(model: torch.nn.Module) -> tuple[int, int, int]:
    """(layers, key heads, head size) of the model. Raises ConfigError for attention that blocks cannot hold."""
    config = getattr(model, "config").get_text_config()  # noqa: B009
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if kinds != {"full_attention"} or not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"engine type 'embedded' needs a model with full attention in every layer, got "
            f"{type(model).__name__} with {sorted(kinds)}; Llama, Qwen2 and Qwen3 types without sliding windows work"
        )
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or num_heads, head_size


def cached_numbers(model: torch.nn.Module) -> int:
    """Keys and values of one token in all layers. Raises ConfigError as `attention_shape` does.

    The model may be one without memory (`torch.device("meta")`).
    """
    layers, key_heads, head_size = attention_shape(model)
    return 2 * layers * key_heads * head_size


AttentionInterface.register(ATTENTION, block_attention)
