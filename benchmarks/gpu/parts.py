"""Parts of benchmarks/gpu/run.py: each takes (device, short) and returns its figures, or raises why not."""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import device_models
import torch

ROOT = Path(__file__).parents[2]
Figures = dict[str, Any]
Measure = Callable[[str, bool], Figures]


class CannotRun(Exception):
    """The part needs what is not here; the text says what."""


class Missed(AssertionError):
    """A figure is not what it must be; the figures are in the report all the same."""

    def __init__(self, what: str, figures: Figures) -> None:
        super().__init__(what)
        self.figures = figures


def part_of(name: str) -> Measure:
    """The part of that name."""
    return PARTS[name]


def needs_cuda(device: str, what: str) -> None:
    """Raises CannotRun where the device is a CPU, or is not there."""
    if not device.startswith("cuda"):
        raise CannotRun(f"{what} needs CUDA, and the device asked for is '{device}'")
    needs_device(device)


def needs_device(device: str) -> None:
    """Raises CannotRun where the device is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CannotRun("it needs CUDA, and torch sees no CUDA device")


def machine(device: str, short: bool) -> Figures:
    """Versions and the device; on CUDA a product, and a kernel that is compiled here."""
    names = ("torch", "triton", "transformers", "tokenizers", "numpy", "peft", "pydantic", "ray", "vllm")
    figures: Figures = {"python": platform.python_version(), "cores": os.cpu_count()}
    figures |= {name: version_of(name) for name in names}
    figures["compiler"] = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang") or "none"
    if not device.startswith("cuda"):
        return figures
    needs_device(device)
    card = torch.cuda.get_device_properties(device)
    figures |= {"card": card.name, "memory_gib": round(card.total_memory / 2**30, 1)}
    figures |= {"capability": f"{card.major}.{card.minor}", "cuda": torch.version.cuda}
    figures["cudnn"] = torch.backends.cudnn.version()
    began = time.perf_counter()
    numbers = torch.arange(1000.0, device=device)
    found = torch.compile(lambda x: (x * 2 + 1).sum())(numbers)
    figures["first_compiled_kernel_s"] = round(time.perf_counter() - began, 2)
    if found.item() != 1_000_000.0:
        raise Missed(f"a compiled kernel found {found.item()} instead of 1000000", figures)
    return figures


def version_of(package: str) -> str:
    """Its version, or `not here`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not here"


def conformance(device: str, short: bool) -> Figures:
    """tests/gpu: each test with its outcome. On a CPU those that need CUDA are left out, and named."""
    needs_device(device)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if short:
            words += ["-k", "equal_logits or not_there or foretells"]
        elif importlib.util.find_spec("xdist"):
            words += ["-n", "4"]  # Most of the time goes into compiling, and a spoiled process spoils a quarter.
        hidden = {} if device.startswith("cuda") else {"CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(words, cwd=ROOT, env={**os.environ, **hidden}, check=False)
        if not report.exists():
            raise AssertionError(f"pytest ended with {ended.returncode} and left no report")
        return outcomes(report)


def outcomes(report: Path) -> Figures:
    """Of a JUnit file: how many tests passed, and the names and reasons of the others."""
    passed, skipped, failed = 0, dict[str, str](), dict[str, str]()
    for case in Xml.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        missing = case.find("skipped")
        if wrong is not None:
            failed[name] = f"{wrong.get('message')}"[:1500]
        elif missing is not None:
            skipped[name] = f"{missing.get('message')}"
        else:
            passed += 1
    figures: Figures = {"tests_passed": passed, "tests_failed": failed, "tests_that_cannot_run": skipped}
    if failed or not passed:
        raise Missed(f"{len(failed)} tests of {passed + len(failed)} failed", figures)
    return figures


def agreement(device: str, short: bool) -> Figures:
    """Engine against trainer: on a seed model of the examples, and far from the start of long rows."""
    needs_device(device)
    from flexmarl.testing.training import agreement as agreed

    figures: Figures = {}
    kinds = [("seed model", device_models.seed_model, device_models.requests(100, longest=90, max_tokens=24))]
    if not short:
        kinds.append(
            ("30M parameters", device_models.thirty_million, device_models.requests(8192, longest=1500, max_tokens=64))
        )
    # In float32 the last digits; in bfloat16 the rounding of two orders of adding, 0.001 to 0.01 on a CPU.
    for dtype, measure, at_most in (("float32", "largest", 1e-3), ("bfloat16", "mean", 0.03)):
        for name, make, asked in kinds:

            async def both(make: Any = make, dtype: Any = dtype, asked: Any = asked) -> Any:
                async with device_models.engine_and_trainer(make, device, dtype) as (engine, trainer):
                    return await agreed(engine, trainer, asked)

            found = asyncio.run(both())
            figures[f"{dtype}, {name}"] = {"tokens": found.num_tokens, "mean": found.mean, "largest": found.largest}
            if getattr(found, measure) > at_most:
                raise Missed(f"{dtype}, {name}: {measure} {getattr(found, measure):.2g} is above {at_most}", figures)
    return figures


def memory(device: str, short: bool) -> Figures:
    """Bytes on the device before, awake, asleep and woken; the answers must be the same after it."""
    needs_cuda(device, "what sleep frees is memory of the device, which")

    def held() -> float:
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device) / 2**30

    async def life() -> Figures:
        make = device_models.thirty_million if short else device_models.half_billion
        asked, figures = device_models.requests(8192, longest=200, max_tokens=16), Figures(gib_before=held())
        async with device_models.engine_alone(make, device) as engine:
            first = await device_models.answers(engine, asked)
            figures["gib_awake"] = held()
            figures["sleep_s"] = await seconds(engine.sleep, device)
            figures |= {"gib_asleep": held(), "gib_reserved_asleep": torch.cuda.memory_reserved(device) / 2**30}
            figures["wake_s"] = await seconds(engine.wake, device)
            figures["gib_woken"] = held()
            if await device_models.answers(engine, asked) != first:
                raise Missed("the answers after sleep and wake differ", figures)
        return figures

    figures = {name: round(value, 4) for name, value in asyncio.run(life()).items()}
    if figures["gib_asleep"] - figures["gib_before"] > 0.001:
        raise Missed("an engine that sleeps holds memory of the device", figures)
    # Blocks of keys and values are taken again when requests need them.
    if not figures["gib_asleep"] < figures["gib_woken"] <= figures["gib_awake"] + 0.01:
        raise Missed("a woken engine holds more memory than before, or none", figures)
    return figures


async def seconds(work: Callable[[], Awaitable[object]], device: str) -> float:
    """How long it takes until the device has done it."""
    began = time.perf_counter()
    await work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def learning(device: str, short: bool) -> Figures:
    """examples/math_team in one process; from its seed model to 0.3 more held-out success."""
    needs_device(device)
    from rich.console import Console

    from flexmarl.assemble.commands import assemble_run
    from flexmarl.config import load_run

    steps, tasks = (1, 16) if short else (16, 256)
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["cluster.backend=inline", f"cluster.device={device}", f"out={folder}"]
        overrides += [f"steps={steps}", f"evaluate.tasks={tasks}"]
        # A decode step takes a GPU the same time for any number of rows: all episodes of a step play together.
        overrides += [f"policies.{policy}.engine.slots=256" for policy in ("solver", "verifier")]
        # No row is long enough for a tree there, and the kernel's trial in float32 compiles for half a minute.
        overrides += [f"policies.{policy}.training.tree=off" for policy in ("solver", "verifier")]
        if short:
            overrides += ["batch.groups=4", "batch.episodes=4"]
        settings = load_run(ROOT / "examples/math_team/cpu.yaml", overrides)
        began = time.perf_counter()
        summary = assemble_run(settings).train(Console(file=sys.stdout, width=120))
        took = time.perf_counter() - began
    before, after = (float(summary.eval[when]["success"]) for when in ("before", "after"))
    figures: Figures = {"success_before": before, "success_after": after, "steps": summary.steps}
    figures |= {"seconds": round(took, 1), "tokens_per_s": round(summary.tokens / took)}
    figures |= {f"{phase}_s": round(spent, 1) for phase, spent in summary.time.items()}
    if not short and after < before + 0.3:
        raise Missed(f"held-out success went from {before:.3f} to {after:.3f}, less than 0.3 up", figures)
    return figures


def sound(measured: tuple[Figures, str]) -> Figures:
    """The figures, if nothing is wrong with them."""
    figures, wrong = measured
    if wrong:
        raise Missed(wrong, figures)
    return figures


def trees(device: str, short: bool) -> Figures:
    """Gradients and speed along trees, and what `auto` decides."""
    needs_device(device)
    from tree_training import measure

    return sound(measure(device, short=short))


def training(device: str, short: bool) -> Figures:
    """Whole steps of models of two sizes."""
    needs_device(device)
    from device_training import measure

    return measure(device, short=short)


def weights(device: str, short: bool) -> Figures:
    """Set, Get and digest of weights on the device."""
    needs_device(device)
    from device_transfers import weights as measure

    return sound(measure(device, short=short))


def swaps(device: str, short: bool) -> Figures:
    """A policy's training state leaves the device and comes back."""
    needs_device(device)
    from device_transfers import swaps as measure

    return sound(measure(device, short=short))


def benchmark(device: str, short: bool) -> Figures:
    """The tree benchmark's own figures."""
    needs_cuda(device, "benchmarks/gpu/tree.py")
    words = [
        sys.executable,
        str(ROOT / "benchmarks/gpu/tree.py"),
        "--json",
        "--repeats",
        "2",
        "--only",
        "group",
        "short",
    ]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    print(ended.stdout)
    if ended.returncode:
        raise AssertionError(f"benchmarks/gpu/tree.py ended with {ended.returncode}")
    figures: Mapping[str, Any] = json.loads(ended.stdout.splitlines()[-1])["figures"]
    return dict(figures)


PARTS: Mapping[str, Measure] = {
    "machine": machine,
    "conformance": conformance,
    "agreement": agreement,
    "memory": memory,
    "learning": learning,
    "trees": trees,
    "training": training,
    "weights": weights,
    "swaps": swaps,
    "benchmark": benchmark,
}
