"""Decides which blocks of a tree's attention matrix hold anything to compute, from one number per node.

Node q sees node k if and only if k <= q < ends[k]. So block (i, j), queries i and keys j,

    holds a visible pair   if and only if   i == j, or i > j and the largest end in block j lies behind i's first node
    is visible throughout  if and only if   i > j and the smallest end in block j lies behind i's last node

and no matrix of nodes by nodes is ever made. Proof in docs/tree.md.
"""

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.bool_]

BLOCK = 128
"""Nodes of a block, the kernel's own tile."""


def visible_blocks(ends: NDArray[np.int64], block: int) -> tuple[Blocks, Blocks]:
    """[B, B] each: blocks that are partly visible, and blocks that are visible throughout. `ends` is whole blocks.

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
    """Ends of whole blocks: a node of the padding sees itself, and nothing else sees it."""
    padding = np.arange(len(ends), -(-len(ends) // block) * block) + 1
    return np.concatenate([ends, padding])
