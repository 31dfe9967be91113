"""Machine on which this process runs. Benchmarks print these facts with their figures; `check` tests them."""

import importlib
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about a machine. They count only what this process may use."""

    system: str
    """Operating system and architecture, e.g. `Linux-6.1 x86_64`."""
    processor: str
    cores: int
    """Cores that this process may run on."""
    memory_gib: float
    free_memory_gib: float
    python: str
    torch: str
    """Version of torch; empty if it is not installed or cannot be imported."""
    torch_error: str
    """Why torch cannot be imported; empty if it can."""
    devices: tuple[str, ...]
    """Accelerators, e.g. `cuda:0 NVIDIA H200, 139.8 GiB`; empty on a CPU machine."""

    def as_json(self) -> dict[str, Any]:
        """Returns the `machine` field of a benchmark's last line."""
        return asdict(self)


def this_machine() -> Machine:
    """Collects the facts. Imports torch; if that fails, `torch_error` has the reason."""
    memory = psutil.virtual_memory()
    torch_error, devices = "", ()
    try:
        devices = _devices(importlib.import_module("torch"))
    except Exception as error:  # A broken driver raises RuntimeError, a broken library OSError.
        torch_error = f"{type(error).__name__}: {error}"
    return Machine(
        system=f"{platform.system()}-{platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=_cores(),
        memory_gib=round(memory.total / GIB, 1),
        free_memory_gib=round(memory.available / GIB, 1),
        python=platform.python_version(),
        torch="" if torch_error else _version("torch"),
        torch_error=torch_error,
        devices=devices,
    )


def _devices(torch: Any) -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(f"cuda:{i} {card.name}, {card.total_memory / GIB:.1f} GiB" for i, card in enumerate(found))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
