"""benchmarks/gpu/run.py: verdicts, isolation, time limits, and a file that is whole at any moment. No GPU is needed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu/run.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: its own `sys.path` is undone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return __import__("run")


def started(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.deep
def test_on_a_cpu_each_part_runs_or_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    ended = started("--device", "cpu", "--short", "--json", path)
    whole = json.loads(path.read_text())
    assert ended.returncode == 0, json.dumps(whole, indent=1)
    verdicts = {name: part["verdict"] for name, part in whole["parts"].items()}
    assert whole["complete"]
    lacking = {name: verdicts.pop(name) for name in ("memory", "benchmark")}
    assert set(verdicts.values()) == {"passed"}, verdicts
    assert all(verdict.startswith("cannot run: ") and "needs CUDA" in verdict for verdict in lacking.values()), lacking
    assert "8 passed, 0 failed, 2 cannot run" in ended.stdout
    figures = {name: part.get("figures", {}) for name, part in whole["parts"].items()}
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["conformance"]["tests_passed"] >= 2
    assert all("needs CUDA" in reason for reason in figures["conformance"]["tests_that_cannot_run"].values())
    assert figures["agreement"]["float32, seed model"]["largest"] <= 1e-3
    assert figures["learning"]["steps"] == 1
    assert figures["training"]["seed model"]["tokens_per_s"] > 0
    assert figures["weights"]["d2h_vs_ceiling"] > 0
    assert figures["swaps"]["suspend_control_s"] > 0
    assert figures["trees"]["8 of 20 after 100"]["tree_off_by"] <= 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_cuda_a_part_that_is_to_run_on_cuda_says_so(tmp_path: Path) -> None:
    ended = started("--only", "agreement", "--json", tmp_path / "gpu.json")
    assert ended.returncode == 0
    assert "cannot run: it needs CUDA, and torch sees no CUDA device" in ended.stdout


def test_a_part_that_breaks_leaves_its_traceback_stops_no_other_and_the_file_is_whole_after_each(
    run: ModuleType, tmp_path: Path
) -> None:
    path, seen = tmp_path / "gpu.json", list[Any]()
    look: Callable[[str], None] = lambda _: seen.append(json.loads(path.read_text()))  # noqa: E731
    broken, sound = run.Part("no such part", 60.0, ""), run.Part("machine", 60.0, "")
    parts = run.run_all([broken, sound], "cpu", path, short=True, say=look)["parts"]
    assert parts["no such part"]["verdict"] == "failed"
    assert "KeyError: 'no such part'" in parts["no such part"]["traceback"]
    assert parts["machine"]["verdict"] == "passed"
    assert [list(whole["parts"]) for whole in seen] == [["no such part"], ["no such part", "machine"]]
    assert [whole["complete"] for whole in seen] == [False, True]


def test_a_part_that_takes_too_long_is_ended(run: ModuleType, tmp_path: Path) -> None:
    # Importing torch alone takes longer.
    whole = run.run_all([run.Part("learning", 0.2, "")], "cpu", tmp_path / "gpu.json", short=True, say=lambda _: None)
    assert whole["parts"]["learning"]["verdict"] == "failed"
    assert whole["parts"]["learning"]["why"] == "it took longer than its limit of 0 s"


def test_all_parts_have_time_within_eight_minutes_even_if_one_takes_all_of_its_own(run: ModuleType) -> None:
    assert run.WHOLE_S + 10 <= 8 * 60
    assert all(part.limit_s < run.WHOLE_S / 2 for part in run.PARTS)


def test_every_part_has_code(run: ModuleType) -> None:
    import parts

    assert list(parts.PARTS) == [part.name for part in run.PARTS]
