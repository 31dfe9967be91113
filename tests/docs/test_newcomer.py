"""The three tasks of a newcomer, done by following the pages to the letter: own workflow, own estimator, own engine.

The package is copied, and the files and lines of the page are added to the copy: a test never changes the tree.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flexmarl.agents import load_code
from flexmarl.analysis.summary import Summary
from flexmarl.cli import app
from tests.docs.pages import ROOT, blocks, commands, files

SEED_MODEL = "math_team/seed_model"


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def extended_copy(page: str, folder: Path) -> list[str]:
    """A copy of the package with the page's files and lines in it; returns the new files' paths."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files(page).items():
        assert not (folder / path).exists(), f"{path} is to be a new file"
        (folder / path).write_text(text)
    for path, line in files(page, "line").items():
        assert line.count("\n") == 1, "one line"
        table = (folder / path).read_text()
        head, rest = table.split("Mapping[str, str] = {\n", 1)
        (folder / path).write_text(f"{head}Mapping[str, str] = {{\n{line}{rest}")
    return [path for path in files(page) if path.startswith("src/")]


def assert_in_style(file: str, folder: Path) -> None:
    """The page's file passes the checks of style."""
    config = ("--config", str(ROOT / "pyproject.toml"))
    python(folder, "-m", "ruff", "check", *config, file)
    python(folder, "-m", "ruff", "format", "--check", *config, file)


def python(folder: Path, *words: str) -> str:
    """Runs Python on the copy; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_workflow_of_ones_own_needs_no_file_in_the_package(tmp_path: Path) -> None:
    page = "docs/howto/workflow.md"
    shutil.copytree(ROOT / "examples" / SEED_MODEL, tmp_path / SEED_MODEL)
    (tmp_path / "my_team").mkdir()
    for path, text in files(page).items():
        (tmp_path / path).write_text(text)
    check, train = [shlex.split(command)[1:] for command in commands(page)]
    checked = CliRunner().invoke(app, [check[0], str(tmp_path / check[1].removeprefix("examples/"))])
    assert checked.exit_code == 0, checked.output
    assert "level L1" in " ".join(checked.output.split())
    trained = CliRunner().invoke(
        app, [train[0], str(tmp_path / train[1].removeprefix("examples/")), f"out={tmp_path / 'runs'}"]
    )
    assert trained.exit_code == 0, trained.output
    folder = Path(trained.output.strip().splitlines()[-1])
    summary = (folder / "summary.json").read_text()
    assert '"version": 2' in summary, "two steps, two updates"
    assert all(field in summary for field in ("either_right", *Summary.__slots__))
    _scripted(page, tmp_path)


def _scripted(page: str, folder: Path) -> None:
    """The blocks that go with a file of the page."""
    for block in blocks(page, "python"):
        if "with" in block.notes:
            space = dict(vars(load_code(folder / block.notes["with"])))
            exec(compile(block.text, page, "exec"), space)


def test_an_estimator_of_ones_own_is_one_file_and_one_line(tmp_path: Path) -> None:
    page = "docs/howto/estimator.md"
    (new_file,) = extended_copy(page, tmp_path)
    assert_in_style(new_file, tmp_path)
    assert python(tmp_path, "check_best_of.py") == "best_of keeps the laws of credit\n"
    (piece,) = blocks(page, "yaml")
    (tmp_path / "credit.yaml").write_text(piece.text)
    parse = "import yaml; from flexmarl.credit import CreditSettings as C"
    said = python(tmp_path, "-c", f"{parse}; print(repr(C(**yaml.safe_load(open('credit.yaml'))['credit'])))")
    assert "BestOf(" in said


def test_an_engine_of_ones_own_is_one_file_and_one_line_and_trains(tmp_path: Path) -> None:
    page = "docs/howto/engine.md"
    (new_file,) = extended_copy(page, tmp_path)
    assert_in_style(new_file, tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (command,) = commands(page)
    words = shlex.split(command)[1:]
    # One process for both, for most of its time goes into importing torch. The command first, as from a shell.
    (tmp_path / "both.py").write_text(
        "import runpy, sys\n"
        "from flexmarl.cli import main\n"
        f"sys.argv = ['flexmarl', *{words!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end\n"
        "runpy.run_path('check_plain.py', run_name='__main__')\n"
    )
    *run, verdict = python(tmp_path, "both.py").splitlines()
    assert verdict == "the plain engine keeps the contract"
    assert any("solver v1" in line for line in run)
    assert (tmp_path / run[-1] / "summary.json").is_file()
