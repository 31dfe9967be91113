"""FlexAttention on a prefix tree: only blocks with a visible pair are computed, in one call on a GPU.

Node q sees node k if and only if k <= q < ends[k]. So block (i, j), with queries i and keys j,

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
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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
    attend = torch.compile(flex_attention, dynamic=True)

    # Set around every call: the limit is per thread, and activation checkpointing repeats a pass on autograd's thread.
    @torch._dynamo.config.patch(recompile_limit=_GRAPHS)
    def limited(*args: Any, **options: Any) -> object:
        return attend(*args, **options)

    return limited
