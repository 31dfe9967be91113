"""Weights and training state on their way between the device and host memory, by copies into pinned memory."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from state_swap import WIDTHS, measured
from tree_training import wait_for

from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import ObjectKey, checksum, weights_key
from flexmarl.records import PolicyName, Version

REPEATS = 5
TENSOR_MIB = 16
ROUNDED = 2**20
"""Bytes that may stay: torch's and the kernels' own."""


def weights(device: str, *, short: bool) -> tuple[dict[str, Any], str]:
    """Set and Get of weights that live on the device, and their digest there. Figures, and what is wrong with them."""
    mib = 64 if short else 1024
    torch.manual_seed(0)
    tree = {
        f"layers.{place}.weight": torch.randn(TENSOR_MIB * 2**18, device=device) for place in range(mib // TENSOR_MIB)
    }
    pinned = torch.zeros(mib * 2**18, pin_memory=device.startswith("cuda"))
    there = torch.zeros(mib * 2**18, device=device)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        store = ShmObjectStore(Path(folder) / "blocks")
        store.create()
        newest = 0

        def key(version: int) -> ObjectKey:
            return weights_key(PolicyName("solver"), Version(version))

        async def set_next() -> None:
            nonlocal newest
            newest += 1
            await store.set(key(newest), tree, verify="names")
            await store.release(key(newest - 1))

        rates = {
            "copy_to_host": rate(lambda: pinned.copy_(there, non_blocking=True), mib, device),
            "set": rate(lambda: asyncio.run(set_next()), mib, device),
            "copy_to_device": rate(lambda: there.copy_(pinned, non_blocking=True), mib, device),
            "get": rate(lambda: asyncio.run(store.get_into(key(newest), tree, verify="names")), mib, device),
            "digest": rate(lambda: checksum(tree), mib, device),
        }
    figures = {f"{name}_gib_s": round(found, 2) for name, found in rates.items()}
    figures["d2h_vs_ceiling"] = round(rates["set"] / rates["copy_to_host"], 3)
    figures["h2d_vs_ceiling"] = round(rates["get"] / rates["copy_to_device"], 3)
    figures["digest_vs_copy"] = round(rates["digest"] / rates["copy_to_host"], 3)
    alike = checksum(tree) == checksum({name: tensor.cpu() for name, tensor in tree.items()})
    return figures, "" if alike else "the digest of the device is another one than that of the CPU"


def rate(work: Callable[[], object], mib: int, device: str) -> float:
    """GiB per second: median after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return mib / 1024 / statistics.median(seconds[1:])


def swaps(device: str, *, short: bool) -> tuple[dict[str, Any], str]:
    """A policy leaves the device and comes back, as benchmarks/state_swap.py has it. Figures, and what is wrong."""
    control = measured(32, REPEATS, device)
    figures: dict[str, Any] = {f"{name}_control_s": round(control[name], 3) for name in ("suspend", "resume")}
    left = control["bytes_left"]
    for size in () if short else (100, 500):
        found = measured(WIDTHS[size], REPEATS, device)
        data_s = sum(found[name] - control[name] for name in ("suspend", "resume"))
        figures[f"{size}M"] = {
            "state_gib": round(found["bytes"] / 2**30, 2),
            **{f"{name}_s": round(found[name], 3) for name in ("suspend", "resume", "memcpy")},
            "swap_vs_ceiling": round(2 * found["memcpy"] / data_s, 3),
        }
        left = max(left, found["bytes_left"])
    return figures, f"{left} bytes of the policy stayed on the device" if left > ROUNDED else ""
