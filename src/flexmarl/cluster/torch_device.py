"""Torch on the device of this process: how a model comes onto it, and which kernels run there.

On a CPU nothing is changed. CUDA has several kernels for one operation, and PyTorch chooses by shape and by default
settings that suit one large batch, not an engine and a trainer that must agree on every log-probability.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""What cuBLAS reads when it is first used: without it, PyTorch's deterministic mode refuses every matrix product."""


def place(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Moves and casts in place. Buffers keep their type: rotary frequencies in bfloat16 misplace distant tokens."""
    choose_kernels(torch.device(device))
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def choose_kernels(device: torch.device) -> None:
    """Sets once per process, for CUDA, what must not depend on the shapes of a batch."""
    if device.type != "cuda":
        return
    # cuDNN's attention, which PyTorch prefers on Hopper, builds a plan of some 30 ms for every new shape, and nearly
    # every decode step and every pass of a trainer has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Partial sums rounded to bfloat16 make a product depend on the number of rows: the engine's is not the trainer's.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic_kernels(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """In the block, if wanted and on CUDA, equal inputs give equal bits: backward passes there add in any order else.

    Raises RuntimeError (of torch) where an operation has no such kernel.
    """
    if not wanted or device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def free_unused(device: torch.device | str) -> None:
    """Gives what torch keeps for later back to the device, for whoever shares it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
