"""FlashAttention for CPUs, piece by piece along a prefix tree."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import repeat_kv

from flexmarl.training.tree.pieces import Chains, Pieces, Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
        d_query, d_key, d_value = (torch.empty_like(t) for t in (query, key, value))
        for piece, mask in ctx.attention.own:
            given = (_of(piece, t) for t in (grad, query, key, value, out, logsum))
            found = _backward(*given, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
            for total, part in zip((d_query, d_key, d_value), found, strict=True):
                _of(piece, total).copy_(part)
        for side in ctx.attention.sides:
            seeing, seen = slice(side.start, side.stop), slice(side.seen_start, side.seen_stop)
            g, q, o, s = (t[:, :, seeing] for t in (grad, query, out, logsum))
            found = _backward(g, q, key[:, :, seen], value[:, :, seen], o, s, 0.0, False, scale=ctx.scale)
            d_query[:, :, seeing] += found[0]
            d_key[:, :, seen] += found[1]
            d_value[:, :, seen] += found[2]
        return d_query, d_key, d_value, None, None


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
