"""Plug-ins in the ray world: the processes of engines and trainers import them too, from files and from packages."""

import os
import tomllib
from pathlib import Path

import pytest

from flexmarl.events.group_events import EpisodeFailed
from tests.docs.pages import files
from tests.ray.child_run import Child, Left
from tests.small_run import write_team

pytestmark = pytest.mark.ray

PAGE = "docs/howto/plugins.md"
CONFIG = """
extends: run.yaml
code: [tasks.py, own.py]
cluster: {backend: ray, threads: 1}
credit:
  per_agent: {solver: {type: own_estimator}, writer: {type: pkg_estimator}}
  shaping: [{type: own_term, exponent: 3, agents: [solver]}, {type: pkg_term, exponent: 2, agents: [writer]}]
policies:
  one: {engine: {type: own_engine, slots: 16}, training: {loss: {type: own_loss}}}
  two:
    model: model
    engine: {type: pkg_engine, slots: 16}
    training: {micro_batch: 16, loss: {type: pkg_loss}, optimizer: {learning_rate: 1e-2}}
team:
  workflow: {type: custom, name: echo}
  agents:
    solver: {tools: [{type: own_tool}], syntax: {type: function, names: {length: own_tool}}}
    writer: {policy: two, tools: [{type: pkg_tool}], syntax: {type: function, names: {length: pkg_tool}}}
steps: 1
evaluate: {tasks: 0}
"""
IMPORTED = """
import os
from pathlib import Path
Path({seen!r}, f"{prefix}-{{os.getpid()}}").touch()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the page's plug-ins in a file, and again in a package as pip installs it, on the search path.

    Each import of them leaves a file in `seen` that names the process.
    """
    (tmp_path / "seen").mkdir()
    write_team(tmp_path)
    text = files(PAGE)["my_project/own.py"]
    for prefix, path in (("own", tmp_path / "own.py"), ("pkg", tmp_path / "site/my_package/__init__.py")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("own_", f"{prefix}_") + IMPORTED.format(seen=str(tmp_path / "seen"), prefix=prefix)
        )
    installed = tmp_path / "site/my_package-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n")
    offered = tomllib.loads(files(PAGE)["my_package/pyproject.toml"].replace("own_", "pkg_"))["project"]["entry-points"]
    lines = [f"[{group}]\n{name} = {value}" for group, one in offered.items() for name, value in one.items()]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "plugged.yaml").write_text(CONFIG)
    return tmp_path


def test_processes_of_engines_and_trainers_use_plug_ins_of_a_file_and_of_a_package(
    project: Path, short_root: Path
) -> None:
    child = Child("train", project / "plugged.yaml", f"out={project}", cwd=project, temp=short_root)
    try:
        assert child.wait() == 0, child.stderr
    finally:
        child.close()
    (folder,) = project.glob("sums-*")
    run = Left(folder)
    assert not run.events(EpisodeFailed)
    versions = {name: policy["version"] for name, policy in run.summary["policies"].items()}
    assert versions == {"one": 1, "two": 1}
    pids = {name: process["pid"] for name, process in run.summary["processes"].items()}
    imported = {path.name for path in (project / "seen").iterdir()}
    expected = {f"own-{pid}" for pid in pids.values()}
    expected |= {f"pkg-{pids[name]}" for name in ("controller", "engine/two/0", "trainer/two")}
    assert expected <= imported
    assert len(set(pids.values())) == 5, "witness: each is a process of its own"
