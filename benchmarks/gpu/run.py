"""Everything that needs CUDA, on one device, within 8 minutes: conformance, agreement, memory, learning, trees.

    make gpu
    python benchmarks/gpu/run.py --json gpu.json [--only learning trees] [--device cpu] [--short]

Each part runs in a process of its own, since an error of a CUDA kernel spoils its whole process, and has a time limit.
The JSON file is written anew after every part, so that it is whole whenever the run is ended. A part `passed`,
`failed` (its traceback is in the file), or `cannot run`, with the reason. Exit code 1 if any failed. With
`--device cpu` the parts that a CPU can run are run there; `--short` makes them small.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks/gpu"), str(ROOT)]

WHOLE_S = 470.0
"""Of all parts, so that the whole ends within 8 minutes."""
OUTPUT_CHARACTERS = 6000
"""Of the end of what a failed part has printed."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part: `measure` of its module in benchmarks/gpu takes (device, short) and returns its figures."""

    name: str
    limit_s: float
    means: str


PARTS = (
    Part("machine", 60, "what is there, and whether a kernel is compiled and runs"),
    Part("conformance", 200, "tests/gpu: engine, trainer, trees, memory and whole runs against their contracts"),
    Part("agreement", 60, "log-probabilities of the engine and of the trainer for the same tokens"),
    Part("memory", 45, "what sleep gives back and wake takes, on a model of 0.5B parameters"),
    Part("learning", 150, "math_team in one process: held-out success rises by 0.3"),
    Part("trees", 90, "training along prefix trees: gradients, speed, and what `auto` decides"),
    Part("training", 60, "steps of 0.5B and 1.5B parameters in bfloat16: tokens per second, share of the peak, memory"),
    Part("weights", 45, "set, get and digest of 1 GiB of weights on the device, by copies into pinned memory"),
    Part("swaps", 90, "training state of 0.1B and 0.5B parameters leaves the device and comes back; nothing stays"),
    Part("benchmark", 90, "benchmarks/gpu/tree.py on two of its workloads"),
)


def run_part(part: Part, device: str, *, short: bool, limit_s: float) -> dict[str, Any]:
    """What came of a part, run in a process of its own: verdict, figures, seconds, and why if it did not pass."""
    with tempfile.TemporaryDirectory(prefix="flexmarl-gpu-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        words = [sys.executable, __file__, "--child", part.name, "--device", device, "--json", str(report)]
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*words, *(["--short"] if short else [])],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            ended = finished(child, limit_s)
        found: dict[str, Any] = {"verdict": "failed", "seconds": round(time.monotonic() - began, 1)}
        if not ended:
            found["why"] = f"it took longer than its limit of {limit_s:.0f} s"
        elif report.exists():
            found |= json.loads(report.read_text(encoding="utf-8"))
        else:
            found["why"] = f"its process ended with {child.returncode} and left no report"
        if found["verdict"] == "failed":
            found["output"] = log.read_text(encoding="utf-8", errors="replace")[-OUTPUT_CHARACTERS:]
        return found


def finished(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether the process ended in time; it and all that it started are ended in any case."""
    try:
        child.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def child(name: str, device: str, report: Path, *, short: bool) -> None:
    """In a part's own process: runs it, and writes what came of it."""
    found: dict[str, Any]
    try:
        from parts import CannotRun, part_of

        if short:
            torch_threads(1)
        try:
            found = {"verdict": "passed", "figures": part_of(name)(device, short)}
        except CannotRun as reason:
            found = {"verdict": f"cannot run: {reason}"}
    except BaseException as error:
        figures = getattr(error, "figures", {})
        why = f"{type(error).__name__}: {error}"
        found = {"verdict": "failed", "figures": figures, "why": why, "traceback": traceback.format_exc()}
    report.write_text(json.dumps(found, default=str), encoding="utf-8")


def torch_threads(number: int) -> None:
    """On a CPU that others use, threads of a small model wait for each other."""
    import torch

    torch.set_num_threads(number)


def run_all(
    chosen: list[Part], device: str, path: Path, *, short: bool, say: Callable[[str], None] = print
) -> Mapping[str, Any]:
    """Runs the parts, and writes the file after each. Returns what is in it."""
    began = time.monotonic()
    whole: dict[str, Any] = {"device": device, "short": short, "complete": False, "parts": {}}
    write(path, whole)
    for part in chosen:
        left_s = WHOLE_S - (time.monotonic() - began)
        if left_s < 10:
            found: dict[str, Any] = {"verdict": f"cannot run: the parts before it took {WHOLE_S - left_s:.0f} s"}
        else:
            found = run_part(part, device, short=short, limit_s=min(part.limit_s, left_s))
        whole["parts"][part.name] = found
        whole["seconds"] = round(time.monotonic() - began, 1)
        whole["complete"] = len(whole["parts"]) == len(chosen)
        write(path, whole)
        say(line_of(part, found))
    return whole


def line_of(part: Part, found: Mapping[str, Any]) -> str:
    """A row of the table that is printed as the parts end."""
    verdict = found["verdict"] + (f": {found['why']}" if "why" in found else "")
    lines = [f"{part.name:<12} {found.get('seconds', 0):>6.1f} s   {verdict}"]
    lines += [f"{'':<24}{name} = {value}" for name, value in found.get("figures", {}).items()]
    return "\n".join(lines)


def write(path: Path, whole: Mapping[str, Any]) -> None:
    """At once: whoever reads it finds the old file or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, default=Path("gpu.json"), help="the file (default gpu.json)")
    options.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    options.add_argument("--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS], help="these parts")
    options.add_argument(
        "--short", action="store_true", help="small sizes, for a look at whether the parts work at all"
    )
    options.add_argument("--child", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child:
        child(asked.child, asked.device, asked.json, short=asked.short)
        return
    chosen = [part for part in PARTS if not asked.only or part.name in asked.only]
    whole = run_all(chosen, asked.device, asked.json, short=asked.short)
    verdicts = [found["verdict"] for found in whole["parts"].values()]
    failed, passed = verdicts.count("failed"), verdicts.count("passed")
    print(f"{passed} passed, {failed} failed, {len(verdicts) - passed - failed} cannot run; {asked.json}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
