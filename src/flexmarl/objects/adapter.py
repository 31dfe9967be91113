"""LoRA adapter as an object on torch: its own tensors alone, and the checksum of their base.

{layer}.lora_A     [rank, in]      a linear layer W of the base serves as  W + scaling B A
{layer}.lora_B     [out, rank]
adapter.scaling    alpha / rank
adapter.base       checksum of the base, as text
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from flexmarl.objects.interface import Checksum, TensorTree

_SCALING, _BASE = "adapter.scaling", "adapter.base"
_A, _B = ".lora_A", ".lora_B"


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """The adapter of one version."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """A and B of each layer, by the layer's name in the base."""
    scaling: float
    base: Checksum
    """Checksum of the weights without the adapter, by the base's names, without tied duplicates."""

    def as_tree(self) -> dict[str, torch.Tensor]:
        """The adapter as a tensor tree; `from_tree` is the inverse."""
        tree = {
            _SCALING: torch.tensor(self.scaling, dtype=torch.float64),
            _BASE: torch.frombuffer(bytearray(self.base.encode()), dtype=torch.uint8),
        }
        for layer, (a, b) in self.layers.items():
            tree[layer + _A], tree[layer + _B] = a, b
        return tree

    @classmethod
    def from_tree(cls, tree: TensorTree) -> Self | None:
        """The adapter in a tensor tree; None if the tree holds whole weights."""
        if _BASE not in tree:
            return None
        layers = {
            name.removesuffix(_A): (tensor, tree[name.removesuffix(_A) + _B])
            for name, tensor in tree.items()
            if name.endswith(_A)
        }
        return cls(layers, tree[_SCALING].item(), Checksum(bytes(tree[_BASE].tolist()).decode()))


@torch.no_grad()
def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Computes W + scaling B A as peft does, so that trainer and engine get the same bits on the same device."""
    if base.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
        return base + ((b.float() @ a.float()) * scaling).to(a.dtype)
    return base + (b @ a) * scaling
