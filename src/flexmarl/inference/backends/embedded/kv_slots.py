"""Slot cache on a transformers `Cache`, and the attention that reads it.

Each sequence owns one row of `max_len` positions. Active sequences are rows 0..n-1, without gaps, so a decode step
reads views and never gathers. One forward pass packs all its tokens into a batch of one: first the next token of every
active row, then the prompts of the joiners, one after the other. Only attention knows where each sequence ends.

    tokens   | row 0 | row 1 | ... | row n-1 | prompt of row n ........ | prompt of row n+1 ..... |
              `----- decode: 1 each -------'   `--- prefill: padded to the longest, masked -----'

Letters: S rows, L positions, T packed tokens, J joiners, M the longest of them, H heads, K key heads, D head size.
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

ATTENTION = "flexmarl_slots"
"""The name under which transformers finds `slot_attention`."""
Integers = NDArray[np.integer]
_ROW_BLOCK = 8
_BLOCK_GAIN = 1024
"""Rows are read in blocks if that spares this many positions. Below, the extra calls cost more than the reading."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """A prompt that enters a row. Positions from `start` on are computed; earlier ones are in the cache already."""

    row: int
    start: int
    ids: IntArray
    """The whole prompt."""


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """Neighbouring rows that are read up to the same position."""

    rows: slice
    kv_length: int
    bias: torch.Tensor
    """[rows, 1, 1, kv_length]; 0 where a row has a key, -inf after its end."""


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """The joiners of one forward pass."""

    rows: slice
    kv_length: int
    width: int
    """M: tokens of the longest joiner."""
    place: torch.Tensor
    """[prompt tokens] index of each token in the padded [J * M]."""
    bias: torch.Tensor | None
    """[J, 1, M, kv_length]; None for a single prompt that is computed from its first token: it is simply causal."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The layout of one forward pass."""

    input_ids: torch.Tensor
    """[1, T]."""
    position_ids: torch.Tensor
    """[1, T]."""
    write_at: torch.Tensor
    """[K * T] flat cache index ((row * K + head) * L + position) for each token's key and value, head by head."""
    num_decode: int
    decode: Sequence[DecodeBlock]
    prefill: PrefillBlock | None
    logits_at: torch.Tensor | int
    """[n + J] tokens that need logits: every decode token and the last token of each prompt; 0 means all tokens."""


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, K, L, D]. The model's attention module calls `update`."""

    def __init__(self, owner: "SlotCache", keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._owner = owner
        self.is_initialized = True
        self.place(keys, values)

    def place(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Points the layer to these views of the cache's block."""
        self._flat_keys, self._flat_values = keys.flatten(0, 2), values.flatten(0, 2)
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the packed [1, K, T, D] tokens where the plan says; returns all rows, [S, K, L, D]."""
        assert self._owner.plan is not None, "the core lays out every forward"
        where = self._owner.plan.write_at
        self._flat_keys.index_copy_(0, where, key_states.reshape(-1, key_states.shape[-1]))
        self._flat_values.index_copy_(0, where, value_states.reshape(-1, value_states.shape[-1]))
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the cache's block is allocated when the cache is made."""

    def get_seq_length(self) -> int:
        """Always 0, because positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """L, the positions of a row."""
        assert self.keys is not None
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never used: transformers calls it to build masks, and none is built here."""
        return query_length, 0


class SlotCache(Cache):
    """Keys and values of all rows and layers in one zeroed block, [layers, 2, S, K, L, D]."""

    plan: SlotPlan | None = None
    """The plan of the forward pass that is being computed."""

    def __init__(self, model: torch.nn.Module, rows: int, max_len: int) -> None:
        layers, key_heads, head_size = attention_shape(model)
        parameter = next(model.parameters())
        self.max_len = max_len
        self._device = parameter.device
        self._on_cpu = self._device.type == "cpu"
        self._shape = (layers, 2, rows, key_heads, max_len, head_size)
        self._dtype = parameter.dtype
        self._block = self._zeros()
        self._row_starts = (np.arange(rows) * key_heads + np.arange(key_heads)[:, None]) * max_len
        """[K, S] flat index of each row's position 0."""
        self._steps = torch.arange(max_len, device=self._device)
        self._zero = torch.zeros((), dtype=parameter.dtype, device=self._device)
        self._masked = torch.full_like(self._zero, -torch.inf)
        super().__init__(layers=[_SlotLayer(self, block[0], block[1]) for block in self._block])

    def set_aside(self, rows: int, length: int) -> None:
        """Frees the device. Keeps the first `length` positions of the first `rows` rows in host memory.

        They can still be copied there.
        """
        self.plan = None
        self._place(self._block[:, :, :rows, :, :length].to("cpu", copy=True))

    def bring_back(self) -> None:
        """Makes the whole block on the device again, with the positions that were kept."""
        kept, block = self._block, self._zeros()
        block[:, :, : kept.shape[2], :, : kept.shape[4]] = kept
        self._place(block)

    def _place(self, block: torch.Tensor) -> None:
        self._block = block
        for layer, (keys, values) in zip(self.layers, block, strict=True):
            assert isinstance(layer, _SlotLayer)
            layer.place(keys, values)

    def _zeros(self) -> torch.Tensor:
        """A zeroed block. Masked positions are read with weight 0, and in unset memory 0 times a NaN would be NaN."""
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies positions `start` to `end` of row `source` to row `target`, in all layers."""
        self._block[:, :, target, :, start:end] = self._block[:, :, source, :, start:end]

    def clear(self, row: int) -> None:
        """Zeroes a row that holds non-finite numbers."""
        self._block[:, :, row] = 0

    def lay_out(self, last_ids: Integers, lengths: Integers, joiners: Sequence[Joiner], fixed_kv: bool) -> SlotPlan:
        """Plans one forward pass: row r < len(last_ids) gets `last_ids[r]` at position `lengths[r]`.

        With `fixed_kv`, every decode row is read up to `max_len`.
        """
        num_decode = len(last_ids)
        if not joiners:
            return SlotPlan(
                input_ids=self._tensor(last_ids)[None],
                position_ids=self._tensor(lengths)[None],
                write_at=self._tensor((self._row_starts[:, :num_decode] + lengths).reshape(-1)),
                num_decode=num_decode,
                decode=self._decode_blocks(lengths, fixed_kv),
                prefill=None,
                logits_at=0,
            )
        fresh = [joiner.ids[joiner.start :] for joiner in joiners]
        sizes = [len(part) for part in fresh]
        rows = np.concatenate([np.arange(num_decode), np.repeat([joiner.row for joiner in joiners], sizes)])
        positions = np.concatenate([lengths, *(np.arange(joiner.start, len(joiner.ids)) for joiner in joiners)])
        ends = num_decode - 1 + np.cumsum(sizes)
        return SlotPlan(
            input_ids=self._tensor(np.concatenate([last_ids, *fresh]))[None],
            position_ids=self._tensor(positions)[None],
            write_at=self._tensor((self._row_starts[:, rows] + positions).reshape(-1)),
            num_decode=num_decode,
            decode=self._decode_blocks(lengths, fixed_kv) if num_decode else (),
            prefill=self._prefill_block(joiners, sizes),
            logits_at=self._tensor(np.concatenate([np.arange(num_decode), ends])),
        )

    def _decode_blocks(self, lengths: Integers, fixed_kv: bool) -> list[DecodeBlock]:
        blocks = [(slice(0, len(lengths)), self.max_len)] if fixed_kv else row_blocks(lengths, self.max_len)
        longest = max(length for _, length in blocks)
        ends = self._tensor(lengths)[:, None]
        bias = torch.where(self._steps[:longest] <= ends, self._zero, self._masked)[:, None, None]
        if len(blocks) == 1:
            return [DecodeBlock(blocks[0][0], longest, bias)]
        return [DecodeBlock(rows, length, bias[rows, :, :, :length]) for rows, length in blocks]

    def _prefill_block(self, joiners: Sequence[Joiner], sizes: list[int]) -> PrefillBlock:
        width, kv_length = max(sizes), max(len(joiner.ids) for joiner in joiners)
        rows = slice(joiners[0].row, joiners[0].row + len(joiners))
        place = np.concatenate([index * width + np.arange(size) for index, size in enumerate(sizes)])
        bias = None
        if len(joiners) > 1 or joiners[0].start > 0:
            starts = self._tensor(np.array([joiner.start for joiner in joiners]))
            ends = starts[:, None, None, None] + self._steps[:width, None]
            bias = torch.where(self._steps[:kv_length] <= ends, self._zero, self._masked)
        return PrefillBlock(rows, kv_length, width, self._tensor(place), bias)

    def _tensor(self, values: Integers) -> torch.Tensor:
        tensor = torch.from_numpy(values if values.dtype == np.int64 else values.astype(np.int64))
        return tensor if self._on_cpu else tensor.to(self._device, non_blocking=True)


def row_blocks(lengths: Integers, max_len: int) -> list[tuple[slice, int]]:
    """Cuts rows into blocks of neighbours, each read up to a common position; one block if cutting spares too little.

    >>> row_blocks(np.array([5, 7, 30]), 64)
    [(slice(0, 3, None), 32)]
    """
    num_rows = len(lengths)
    longest = min(int(lengths.max()) // 16 * 16 + 16, max_len)
    if num_rows * longest - int(lengths.sum()) < _BLOCK_GAIN:
        return [(slice(0, num_rows), longest)]
    rounded = np.minimum(lengths // 16 * 16 + 16, max_len)
    starts = np.arange(0, num_rows, _ROW_BLOCK)
    tops = np.maximum.reduceat(rounded, starts)
    sizes = np.diff(np.append(starts, num_rows))
    if num_rows * longest - int((tops * sizes).sum()) < _BLOCK_GAIN:
        return [(slice(0, num_rows), longest)]
    return [
        (slice(int(start), int(start + size)), int(top)) for start, size, top in zip(starts, sizes, tops, strict=True)
    ]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_plan: SlotPlan | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of the packed queries [1, H, T, D] over the cache rows [S, K, L, D]; returns [1, T, H, D]."""
    if slot_plan is None:
        raise EngineError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sliding_window", "position_bias")):
        raise EngineError(f"{type(module).__name__} wants more than plain full attention, which slots do not have")
    tokens = query[0].transpose(0, 1)
    num_decode = slot_plan.num_decode
    parts = [_decode(tokens, key, value, block, scaling) for block in slot_plan.decode]
    if slot_plan.prefill is not None:
        parts.append(_prefill(tokens[num_decode:], key, value, slot_plan.prefill, scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(
    tokens: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: DecodeBlock, scaling: float | None
) -> torch.Tensor:
    """Attention of one query per row. The H / K heads of a key head take the place of queries: no key is repeated."""
    query = tokens[block.rows]
    num_rows, num_heads, size = query.shape
    key = key[block.rows, :, : block.kv_length]
    value = value[block.rows, :, : block.kv_length]
    grouped = query.reshape(num_rows, key.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=block.bias, scale=scaling)
    return out.reshape(num_rows, num_heads, size)


def _prefill(
    tokens: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: PrefillBlock, scaling: float | None
) -> torch.Tensor:
    _, num_heads, size = tokens.shape
    key = key[block.rows, :, : block.kv_length]
    value = value[block.rows, :, : block.kv_length]
    gqa = key.shape[1] != num_heads
    if block.bias is None:
        query = tokens.transpose(0, 1)[None]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    num_joiners = key.shape[0]
    padded = tokens.new_zeros(num_joiners * block.width, num_heads, size).index_copy_(0, block.place, tokens)
    query = padded.view(num_joiners, block.width, num_heads, size).transpose(1, 2)
    out = scaled_dot_product_attention(query, key, value, attn_mask=block.bias, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(-1, num_heads, size)[block.place]


def attention_shape(model: torch.nn.Module) -> tuple[int, int, int]:
    """(layers, key heads, head size) of the model. Raises ConfigError for attention that slots cannot hold."""
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


AttentionInterface.register(ATTENTION, slot_attention)
