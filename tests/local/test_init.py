"""`flexmarl init` writes a project that is checked and trained as it is, on any model."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from flexmarl.cli import app
from flexmarl.cli.init import MODEL
from flexmarl.errors import ConfigError


def flexmarl(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def project(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project on the tests' model, in the present working directory."""
    monkeypatch.chdir(tmp_path)
    made = flexmarl("init", "my-team", "--model", small_run.parent / "model")
    assert made.exit_code == 0, made.output
    assert made.output.strip() == "my-team: next, cd my-team and flexmarl check run.yaml"
    monkeypatch.chdir(tmp_path / "my-team")
    return tmp_path / "my-team"


def test_a_new_project_is_checked_simulated_and_trained_as_it_is(project: Path) -> None:
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "run.yaml", "team.py"]
    checked = flexmarl("check", "run.yaml")
    assert checked.exit_code == 0, checked.output
    assert "The config is valid" in checked.output
    simulated = flexmarl("simulate", "run.yaml", "steps=2")
    assert simulated.exit_code == 0, simulated.output
    assert "step 2 of 2 ended" in simulated.output
    assert "caution" not in simulated.output
    small = ["steps=2", "batch={groups: 2, episodes: 2}", "evaluate={tasks: 4, every: 1, every_tasks: 4}"]
    trained = flexmarl("train", "run.yaml", *small, "credit.filter=null", "--quiet")
    assert trained.exit_code == 0, f"{trained.output}\n{trained.exception!r}"
    (folder,) = trained.stdout.strip().splitlines()
    summary = json.loads((project / folder / "summary.json").read_text())
    assert (summary["steps"], summary["policies"]) == (2, {"shared": {"version": 2}})
    assert set(summary["eval"]["after"]) >= {"success", "reward/solver", "reward/checker"}
    exported = flexmarl("export", folder, "models", "--best")
    assert exported.exit_code == 0, exported.output


def test_its_readme_says_where_the_keys_are_described(project: Path) -> None:
    readme = (project / "README.md").read_text()
    (source,) = re.findall(r"docs/howto/config\.md of flexmarl's source folder \((.*)\)", readme)
    assert (Path(source) / "docs/howto/config.md").is_file()


def test_its_readme_names_commands_that_there_are(project: Path) -> None:
    commands = [line.split() for line in (project / "README.md").read_text().splitlines() if line[:4] == "    "]
    assert [words[1] for words in commands] == [
        "check", "train", "train", "simulate", "show", "eval", "export"
    ]  # fmt: skip
    for words in commands:
        assert flexmarl(words[1], "--help").exit_code == 0


def test_without_a_model_a_small_one_of_the_hub_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert flexmarl("init", "sums").exit_code == 0
    assert yaml.safe_load(Path("sums/run.yaml").read_text())["policies"]["shared"]["model"] == MODEL


def test_nothing_that_is_there_is_overwritten(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.parent)
    refused = flexmarl("init", "my-team").exception
    assert isinstance(refused, ConfigError)
    assert str(refused) == "NAME: 'my-team' exists already; use another name, or remove it"


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "../model", "~/no model"])
def test_a_path_without_a_model_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = flexmarl("init", "sums", "--model", model).exception
    assert isinstance(refused, ConfigError)
    assert f"--model: '{model}' is no model folder: it does not exist" in str(refused)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model_is_refused_if_it_is_given_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "it has no config.json" in str(flexmarl("init", "sums", "--model", tmp_path).exception)


@pytest.mark.parametrize("name", ["../up", "my team", ""])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused = flexmarl("init", name).exception
    assert isinstance(refused, ConfigError)
    assert f"got {name!r}; use for example 'my_team'" in str(refused)
    assert list(tmp_path.iterdir()) == []
