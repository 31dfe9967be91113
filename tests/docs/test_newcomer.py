"""The three tasks of a newcomer, done by following the pages to the letter: own workflow, own estimator, own engine.

Each is done in a project elsewhere, with the example's folder beside it: nothing in the package is edited.
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


def project(page: str, folder: Path) -> None:
    """Writes the page's files into a folder, and the example's beside them."""
    shutil.copytree(
        ROOT / "examples/math_team", folder / "math_team", ignore=shutil.ignore_patterns("__pycache__", "runs")
    )
    for path, text in files(page).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


def assert_in_style(file: Path) -> None:
    """The page's file passes the checks of style."""
    config = ("--config", str(ROOT / "pyproject.toml"), "--config", "lint.isort.known-first-party = ['flexmarl']")
    python(file.parent, "-m", "ruff", "check", *config, file.name)
    python(file.parent, "-m", "ruff", "format", "--check", *config, file.name)


def python(folder: Path, *words: str) -> str:
    """Runs Python in a folder; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
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


def test_an_estimator_of_ones_own_is_one_file_of_a_project(tmp_path: Path) -> None:
    page = "docs/howto/estimator.md"
    project(page, tmp_path)
    mine = tmp_path / "my_project"
    assert_in_style(mine / "best_of.py")
    assert python(mine, "check_best_of.py") == "best_of keeps the laws of credit\n"
    (piece,) = blocks(page, "yaml")
    rest = "extends: ../math_team/cpu.yaml\n"
    code = "code: [../math_team/tasks.py, ../math_team/workflow.py, ../math_team/replies.py, best_of.py]"
    (mine / "run.yaml").write_text(rest + piece.text.replace("code: [best_of.py]", code))
    load = "from pathlib import Path; from flexmarl.config import load_run"
    said = python(mine, "-c", f"{load}; print(repr(load_run(Path('run.yaml')).credit.estimator))")
    assert "BestOf(" in said
    assert "least_lead=0.05" in said


def test_an_engine_of_ones_own_is_one_file_of_a_project_and_trains(tmp_path: Path) -> None:
    page = "docs/howto/engine.md"
    project(page, tmp_path)
    assert_in_style(tmp_path / "my_project/plain.py")
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
        "sys.path.insert(0, 'my_project')\n"
        "runpy.run_path('my_project/check_plain.py', run_name='__main__')\n"
    )
    *run, verdict = python(tmp_path, "both.py").splitlines()
    assert verdict == "the plain engine keeps the contract"
    assert any("solver v1" in line for line in run)
    assert (tmp_path / run[-1] / "summary.json").is_file()
