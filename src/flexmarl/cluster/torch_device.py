"""Torch on the device of this process: how a model is moved onto it, and which kernels run there.

On a CPU nothing changes. CUDA has several kernels for one operation. PyTorch chooses by shape and by default settings,
which suit one large batch, not an engine and a trainer that must agree on every log-probability.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from torch import nn

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that cuBLAS reads at its first use. Without it, PyTorch's deterministic mode refuses matrix products."""


def place(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Moves and casts a model in place. Buffers keep their type: rotary frequencies in bfloat16 misplace far tokens."""
    choose_kernels(torch.device(device))
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def cpu_multiplies_bfloat16() -> bool:
    """False if this CPU has no instructions for it: large products take at least four times as long as in float32.

    What oneDNN takes says less: with plain AVX-512 it takes bfloat16, and casts it.
    """
    of_cpu = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(of_cpu.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16"))


def set_own_threads(number: int) -> None:
    """Sets torch's number of threads for operations of the calling thread, whatever other threads set later."""
    torch.set_num_threads(number)
    torch.get_num_threads()  # In each thread, the first use takes over the number that any thread set last.


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """Sets torch's number of threads inside the block; whoever else computes on this thread keeps its own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_kernels(device: torch.device) -> None:
    """For CUDA, makes the process choose kernels whose results do not depend on the shapes of a batch."""
    if device.type != "cuda":
        return
    # cuDNN's attention, which PyTorch prefers on Hopper, takes some 30 ms to plan every new shape, and nearly every
    # decode step and every pass of a trainer has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Partial sums rounded to bfloat16 make a product depend on the number of rows: engine and trainer would differ.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic_kernels(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """Inside the block, if `wanted`, equal inputs give equal bits on CUDA. Backward passes otherwise add in any order.

    Raises torch's RuntimeError if an operation has no such kernel.
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
    """Returns the memory that torch keeps for later to the device, for other processes that share it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_heap()


def wait_for_copies(device: torch.device) -> None:
    """Returns when all copies that this thread has begun from or to the device are there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class LockedPages:
    """Pages of a map, locked in memory as long as this lives: CUDA copies from and to them at the rate of the bus.

    Elsewhere a copy goes through a buffer of the driver's, at a fifth of that on an H100. Locking takes about as long
    as a few copies. Where the system refuses, copies stay slow.
    """

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        """Locks the whole map. `device`: one that this process uses."""
        self._map, self._device = memory, device
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._cuda: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            refused = self._cuda.cudaHostRegister(self._address, len(memory), _FOR_ALL_DEVICES)
        self.locked = int(refused) == 0
        """False if the system refused."""
        if not self.locked:
            with suppress(RuntimeError):  # CUDA reports the refusal once more, to whoever asks next.
                torch.zeros(1, device=device)

    def __del__(self) -> None:
        """Unlocks them: the map goes after this."""
        if getattr(self, "locked", False):
            with torch.cuda.device(self._device):
                self._cuda.cudaHostUnregister(self._address)


def host_memory(num_bytes: int) -> mmap.mmap:
    """New memory, in huge pages where the system has them on request: it is filled in a third of the time."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # Not on every system.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


def return_heap() -> None:
    """Returns freed pages of the heap to the system, where the C library can (glibc). It takes about a millisecond.

    Tensors below 32 MiB live in the heap, and glibc keeps what they leave: a run of a model with 135 million
    parameters held 1.2 GiB more after each of its first steps.
    """
    if _trim is not None:
        _trim(0)


def keep_heap() -> None:
    """Has the C library (glibc) serve tensors below 32 MiB from its heap, and keep up to 64 MiB that they leave.

    It comes to these bounds by itself when a tensor of 32 MiB is freed. Until then it gives back the heap's end after
    nearly every operation, and the next one waits for fresh pages: decoding took one and a half times as long.
    """
    if _set_heap is not None:
        _set_heap(_FROM_SYSTEM, 32 << 20)
        _set_heap(_KEPT, 64 << 20)


@contextmanager
def returning_heap(device: torch.device | str) -> Iterator[None]:
    """On a CPU, returns freed pages after a block if this process is 512 MiB or more above where it last was low.

    Each pass of a trainer leaves holes, into which the tensors of the next one do not fit.
    """
    if torch.device(device).type != "cpu":
        yield
        return
    _resident.note()
    yield
    if _resident.growth() >= _WORTH_RETURNING:
        return_heap()
        _resident.low = psutil.Process().memory_info().rss


class _Resident:
    """Resident memory of this process."""

    def __init__(self) -> None:
        self.low = sys.maxsize
        """Bytes: the least since pages were last returned."""

    def note(self) -> int:
        """Bytes now."""
        now = psutil.Process().memory_info().rss
        self.low = min(self.low, now)
        return now

    def growth(self) -> int:
        """Bytes above `low`."""
        return self.note() - self.low


_resident = _Resident()
_WORTH_RETURNING = 512 << 20
"""Bytes. A small model needs what it frees again in the next step; asking the system for it took a fifth of a step."""
_trim, _set_heap = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallopt"))
_FROM_SYSTEM, _KEPT = -3, -1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)."""


def free_bytes(device: torch.device | str) -> int:
    """Memory that is free for this process on the device, or on this machine for a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return psutil.virtual_memory().available
