"""Attention kernels along a prefix tree: FlashAttention piece by piece on CPUs, FlexAttention in one call on GPUs.

FlexAttention computes only blocks with a visible pair. Node q sees node k if and only if k <= q < ends[k]. So block
(i, j), with queries i and keys j,

    holds a visible pair   if and only if   i == j, or i > j and the largest end in block j is past i's first node
    is visible throughout  if and only if   i > j and the smallest end in block j is past i's last node

So one number per node is enough, and no matrix of nodes by nodes is ever made. Proof in docs/tree.md.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._functorch import config as functorch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.sdpa_attention import repeat_kv

from flexmarl.training.tree.pieces import Chains, Pieces, Tile

Blocks = NDArray[np.bool_]

BLOCK = 128
"""Nodes per block: the kernel's own tile."""


def visible_blocks(ends: NDArray[np.int64], block: int) -> tuple[Blocks, Blocks]:
    """[B, B] each: blocks that are partly visible, and blocks that are visible throughout. `ends` fills whole blocks.

    >>> partly, fully = visible_blocks(np.array([4, 4, 3, 4]), block=2)
    >>> partly.tolist(), fully.tolist()
    ([[True, False], [False, True]], [[False, False], [True, False]])
    """
    per_block = ends.reshape(-1, block)
    first = np.arange(len(per_block)) * block
    below = first[:, None] > first
    fully = below & (per_block.min(1) > first[:, None] + block - 1)
    some = below & (per_block.max(1) > first[:, None])
    return (some & ~fully) | (first[:, None] == first), fully


def padded_ends(ends: NDArray[np.int64], block: int) -> NDArray[np.int64]:
    """`ends` padded to whole blocks. A padding node sees only itself, and no other node sees it."""
    padding = np.arange(len(ends), -(-len(ends) // block) * block) + 1
    return np.concatenate([ends, padding])


_GRAPHS = 64
"""Compiled versions of the attention that a process may have. A model has four: with and without gradient, for one
block and for more; a process has a model for each policy. Beyond torch's own limit of 8, torch would silently
materialise the scores of all pairs instead."""


class FlexAttention:
    """Attention of one tree, shared by all layers. Compiled on a GPU; elsewhere a reference for tests."""

    def __init__(self, ends: NDArray[np.int64], device: torch.device) -> None:
        """`ends` is as in `PrefixTree`. Calls must pass nodes that are padded to whole blocks."""
        padded = padded_ends(ends, BLOCK)
        self.num_nodes = len(padded)
        self._mask = _block_mask(padded, device)
        self._attend = _compiled() if device.type == "cuda" else flex_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Takes [1, H, T, D] and returns [1, H, T, D]. Keys and values may have fewer heads than queries."""
        grouped = query.shape[1] != key.shape[1]
        found = self._attend(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=grouped)
        assert isinstance(found, Tensor), "no log-sums were asked for"
        return found


def _block_mask(ends: NDArray[np.int64], device: torch.device) -> BlockMask:
    behind = torch.from_numpy(ends).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < behind[key])

    partly, fully = (_listed(blocks, device) for blocks in visible_blocks(ends, BLOCK))
    return BlockMask.from_kv_blocks(
        *partly, *fully, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(len(ends), len(ends))
    )


def _listed(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, B] number of key blocks of each query block, and [1, 1, B, B] their indices, which come first in a row."""
    counts = torch.from_numpy(blocks.sum(1, dtype=np.int32)).to(device)
    indices = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)).to(device)
    return counts[None, None], indices[None, None]


@cache
def _compiled() -> Callable[..., object]:
    # An open credit group goes backward through one pass twice; without this, the first time uses up what was saved.
    functorch.donated_buffer = False
    attend = torch.compile(flex_attention, dynamic=True)

    # Set around every call: the limit is per thread, and activation checkpointing repeats a pass on autograd's thread.
    @torch._dynamo.config.patch(recompile_limit=_GRAPHS)
    def limited(*args: Any, **options: Any) -> object:
        return attend(*args, **options)

    return limited


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FEW_KEYS = 256
"""With fewer keys torch's backward of a 16-bit type takes longer than that of float32 (`benchmarks/tree.py`)."""


class PiecewiseAttention:
    """Attention of one tree on a CPU. All layers share it."""

    def __init__(self, pieces: Pieces, dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the queries."""
        self.own = [(piece, _additive(piece, dtype)) for piece in pieces.own]
        self.sides = pieces.sides

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Takes [1, H, T, D] and returns [1, H, T, D]. Keys and values may have fewer heads than queries."""
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        return _Piecewise.apply(query, key, value, self, scale)  # pyright: ignore[reportReturnType]


class _Piecewise(torch.autograd.Function):
    """A softmax in pieces. Each piece gives its output and the log of its sum; weighted by the sums, outputs add up.

    The backward of a piece gets the output and the log-sum of all pieces together. Its probabilities are then those of
    the whole softmax, and the gradients of the pieces add up (as between blocks in FlashAttention-2, arXiv 2307.08691).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: PiecewiseAttention, scale: float
    ) -> Tensor:
        out = torch.empty_like(query)
        logsum = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for piece, mask in attention.own:
            q, k, v, o, s = (_of(piece, t) for t in (query, key, value, out, logsum))
            piece_out, piece_sum = _forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
            o.copy_(piece_out)
            s.copy_(piece_sum)
        for side in attention.sides:
            q, o, s = (t[:, :, side.start : side.stop] for t in (query, out, logsum))
            k, v = (t[:, :, side.seen_start : side.seen_stop] for t in (key, value))
            piece_out, piece_sum = _forward(q, k, v, 0.0, False, scale=scale)
            o.lerp_(piece_out, (piece_sum - s).sigmoid().to(o.dtype)[..., None])
            s.copy_(torch.logaddexp(s, piece_sum))
        ctx.save_for_backward(query, key, value, out, logsum)
        ctx.attention, ctx.scale = attention, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,), (query, key, value, out, logsum) = grads, ctx.saved_tensors
        precise = torch.promote_types(query.dtype, torch.float32)
        d_query, d_key, d_value = (torch.empty_like(t, dtype=precise) for t in (query, key, value))
        for piece, mask in ctx.attention.own:
            given = (_of(piece, t) for t in (grad, query, key, value, out, logsum))
            found = _gradients(*given, ctx.scale, causal=mask is None, mask=mask)
            for total, part in zip((d_query, d_key, d_value), found, strict=True):
                _of(piece, total).copy_(part)
        for side in ctx.attention.sides:
            seeing, seen = slice(side.start, side.stop), slice(side.seen_start, side.seen_stop)
            g, q, o, s = (t[:, :, seeing] for t in (grad, query, out, logsum))
            found = _gradients(g, q, key[:, :, seen], value[:, :, seen], o, s, ctx.scale)
            d_query[:, :, seeing] += found[0]
            d_key[:, :, seen] += found[1]
            d_value[:, :, seen] += found[2]
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _gradients(*given: Any, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `given`: the output's gradient, the three, output, log-sum and scale."""
    *tensors, logsum, scale = given
    precise = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[2].shape[2] < FEW_KEYS:
        tensors, mask = [t.to(precise) for t in tensors], None if mask is None else mask.to(precise)
    return _backward(*tensors, logsum, 0.0, causal, attn_mask=mask, scale=scale)


def _of(piece: Chains | Tile, tensor: Tensor) -> Tensor:
    """View of the nodes of a piece: [1, H, T, ...] -> [count, H, length, ...]."""
    if isinstance(piece, Tile):
        return tensor[:, :, piece.start : piece.stop]
    nodes = tensor[0, :, piece.start : piece.start + piece.length * piece.count]
    return nodes.unflatten(1, (piece.count, piece.length)).transpose(0, 1)


def _additive(piece: Chains | Tile, dtype: torch.dtype) -> Tensor | None:
    """Mask that is added to the scores of a piece; None if it is causal."""
    if isinstance(piece, Chains):
        return None
    hidden = torch.from_numpy(~piece.visible)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))[None, None]
