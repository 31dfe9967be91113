"""oneDNN for a model's linear layers: torch ships it, but does not use it for float32 on x86.

Torch uses MKL there, which uses AVX-512 on Intel's processors only. On an AMD EPYC, MKL reaches 100 GFLOP/s a core,
forward and backward, and oneDNN 180 to 240. Matrix products take most of a small model's CPU time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_ROWS = 16
"""Least rows for oneDNN. With fewer, its fixed cost of about 10 us a call is more than it saves."""


def use_onednn(model: nn.Module) -> None:
    """Puts the model's plain linear layers on oneDNN, in place. Names, parameters and everything else do not change."""
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """Linear layer that uses oneDNN for float32 on a CPU, and torch for the rest: GPUs, other types, few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Product with the weight, plus bias."""
        is_ours = input.dtype == torch.float32 and input.device.type == "cpu"
        if not is_ours or input.numel() < MIN_ROWS * self.in_features:
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """x W^T + b with its gradients. The gradients of x and W are one product each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            _product(grad, weight.t()) if wants_x else None,
            _product(flat.t(), x.flatten(0, -2).t()) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] times [O, I] transposed, by the operator that torch's own compiler calls for linear layers on CPUs."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
