"""Value head on a policy's trunk: one linear output beside the vocabulary's, from the same hidden states."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueHead(nn.Module):
    """What the critic expects from each place of a row.

    It is no part of the model: it is trained and saved with it, and neither published nor exported. It begins at 0,
    so that a new critic expects nothing and the trunk hears nothing of it before it has learned something.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """On the model's device; in float32 or the model's float64, for values of any size must keep their digits."""
        super().__init__()
        embeddings = model.get_input_embeddings()
        width = int(model.config.get_text_config().hidden_size)
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        device = next(embeddings.parameters()).device
        self.weight = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros((), dtype=dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N] values from hidden states [N, H]."""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


@contextmanager
def hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """In the block, collects what the model's head is given, one tensor per forward pass."""
    head, seen = model.get_output_embeddings(), list[Tensor]()
    assert head is not None, "a causal LM has a head"

    def keep(_: nn.Module, inputs: tuple[Any, ...], __: Tensor) -> None:
        seen.append(inputs[0])

    with head.register_forward_hook(keep):
        yield seen
