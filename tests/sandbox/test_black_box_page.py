"""docs/howto/black_box.md to the letter: its files, its episode by hand, its commands."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands, files

PAGE = "docs/howto/black_box.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The page's files, with the math team beside them, where boxes may read them."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o011)
    shutil.copytree(ROOT / "examples/math_team", tmp_path / "math_team", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in files(PAGE).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o644)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    """What a command prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_agent_that_nobody_changed_is_checked_tried_by_hand_and_trained(sandbox, project: Path) -> None:
    check, train, show = (shlex.split(command) for command in commands(PAGE))
    config = [word.removeprefix("examples/") for word in (*check, *train) if word.endswith("run.yaml")]
    assert config == ["my_agent/run.yaml"] * 2
    assert len((project / config[0]).read_text().splitlines()) <= 15
    assert "filesystem" in run(project, *check[:2], config[0])
    tried = run(project / "my_agent", sys.executable, "try_it.py")
    assert "finished" in tried
    assert not tried.rstrip().endswith(" 0 tokens delivered")
    small = ("steps=1", "batch={groups: 2, episodes: 4}", "evaluate.tasks=4", "credit.filter=null")
    folder = run(project, *train[:2], config[1], *small, "out=runs").splitlines()[-1].strip()
    assert '"version": 1' in (project / folder / "summary.json").read_text()
    printed = [path for path in (project / folder / "commands").glob("*.out") if path.read_text().strip()]
    assert printed
    assert "solver" in run(project, *[folder if word == "runs/RUN" else word for word in show])
