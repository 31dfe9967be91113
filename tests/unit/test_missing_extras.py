"""A config that names what an extra brings is refused without it, before a run begins."""

import sys
from pathlib import Path

import pytest

from flexmarl.errors import MissingExtra
from flexmarl.tasks.environment import EnvironmentSettings
from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tools.mcp import McpServer


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"flexmarl.tasks.{name}", raising=False)


@pytest.mark.parametrize("name", ["reasoning_gym", "textarena"])
def test_a_task_generator_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(name, monkeypatch)
    with pytest.raises(MissingExtra, match=f"'{name}' needs the extra '{name}': pip install "):
        GeneratorTasks(name=name).open(seed=0)


def test_an_environment_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without("textarena", monkeypatch)
    with pytest.raises(MissingExtra, match="the environment 'textarena' needs the extra 'textarena': pip install "):
        EnvironmentSettings(name="textarena").resolve()


def test_an_mcp_server_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match="tools of type mcp needs the extra 'mcp': pip install "):
        McpServer(name="shop", url="http://shop", tools_file=tmp_path / "tools.json").tools()
