"""An installed flexmarl, without the source tree, trains with plug-ins of a file and of an installed package."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, files
from tests.small_run import write_team

PAGE = "docs/howto/plugins.md"
CONFIG = """
extends: run.yaml
name: {prefix}
code: {code}
cluster: {{threads: 1}}
credit: {{estimator: {{type: {prefix}_estimator}}, shaping: [{{type: {prefix}_term, exponent: 3}}]}}
policies:
  one:
    engine: {{type: {prefix}_engine, slots: 16}}
    training: {{loss: {{type: {prefix}_loss}}}}
team:
  workflow: {{type: custom, name: {prefix}_workflow}}
  agents:
    solver: {{tools: [{{type: {prefix}_tool}}], syntax: {{type: function, names: {{length: {prefix}_tool}}}}}}
"""
BOTH = """
import sys, flexmarl
from flexmarl.cli import main
for config in ("own_run.yaml", "pkg_run.yaml"):
    sys.argv = ["flexmarl", "train", config]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end
print(flexmarl.__file__)
"""


def run(*words: str | Path, cwd: Path) -> str:
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**without, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """The Python of a bare environment with a wheel of flexmarl and one of the page's package in it.

    It finds the libraries that tests use, but not the source tree: a path in a .pth file brings no .pth files along.
    """
    text = files(PAGE)
    package = tmp_path / "my_package"
    (package / "my_package").mkdir(parents=True)
    (package / "pyproject.toml").write_text(text["my_package/pyproject.toml"].replace("own_", "pkg_"))
    (package / "my_package/__init__.py").write_text(text["my_project/own.py"].replace("own_", "pkg_"))
    built = tmp_path / "built"
    for source in (ROOT, package):
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built, cwd=source)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *sorted(built.glob("*.whl")), cwd=tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_a_wheel_trains_with_plug_ins_of_a_file_and_of_an_installed_package(venv: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    write_team(project)
    (project / "own.py").write_text(files(PAGE)["my_project/own.py"])
    (project / "own_run.yaml").write_text(CONFIG.format(prefix="own", code="[tasks.py, own.py]"))
    (project / "pkg_run.yaml").write_text(CONFIG.format(prefix="pkg", code="[tasks.py]"))
    (project / "both.py").write_text(BOTH)
    *_, place = run(venv, "both.py", cwd=project).splitlines()
    assert Path(place).is_relative_to(tmp_path / "venv")
    for prefix in ("own", "pkg"):
        (folder,) = (project / "runs").glob(f"{prefix}-*")
        assert json.loads((folder / "summary.json").read_text())["steps"] == 2
        credited = [line for line in (folder / "journal.jsonl").read_text().splitlines() if f"{prefix}_term" in line]
        assert credited, "the term is a part of the rewards"
