"""Tensors on a block of bytes, laid out by the packing rule: copied in once, viewed without copying."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from flexmarl.objects.packing import Layout, TensorFacts, plan


def layout_of(tree: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of a tree's tensors, wherever they live."""
    return plan(
        {
            name: TensorFacts(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.element_size())
            for name, tensor in tree.items()
        }
    )


def views(layout: Layout, block: Any, offset: int = 0) -> dict[str, torch.Tensor]:
    """The tensors in a writable block of bytes that begins at `offset`; as long as one lives, the block does."""
    tree: dict[str, torch.Tensor] = {}
    for buffer in layout.buffers:
        dtype = getattr(torch, buffer.dtype)
        items = torch.empty(0, dtype=dtype)
        if buffer.num_items:
            items = torch.frombuffer(block, dtype=dtype, count=buffer.num_items, offset=offset + buffer.offset)
        for slot in buffer.slots:
            tree[slot.name] = items[slot.start : slot.start + prod(slot.shape)].view(slot.shape)
    return tree


def bytes_of(block: Any, offset: int, num_bytes: int) -> torch.Tensor:
    """So many bytes of a block, without copying."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(block, dtype=torch.uint8, count=num_bytes, offset=offset)


def copy_in(tree: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    """Copies every tensor to its view: straight from its device, and contiguous afterwards."""
    with torch.no_grad():
        for name, view in into.items():
            view.copy_(tree[name])
