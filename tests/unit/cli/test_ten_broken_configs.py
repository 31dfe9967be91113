"""Acceptance: each of these configs is refused with exit code 2, and the error names the key, shows the value, says
what works."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl import cli

BROKEN = {
    "an unknown key": (["batch.grups=4"], "batch.grups", "4", "did you mean 'groups'?"),
    "a wrong type": (["steps=many"], "steps", "'many'", "must be a valid integer"),
    "a number out of range": (["batch.episodes=0"], "batch.episodes", "got 0", "greater than or equal to 1"),
    "an unknown kind": (["policies.one.engine.type=vlm"], "policies.one.engine.type", "'vlm'", "one of 'embedded'"),
    "a policy that is not there": (["team.agents.solver.policy=two"], "team.agents.solver.policy", "'two'", "are: one"),
    "a policy that nobody uses": (
        ["policies.idle={model: model}"],
        "policies.idle",
        "'model'",
        "remove it, or name it in one of team.agents: solver",
    ),
    "a file that is not there": (["code=[tasks.py, flow.py]"], "code", "flow.py'", "give the path of a .py file"),
    "a task generator that is not there": (["tasks.name=sum"], "tasks.name", "'sum'", "did you mean 'sums'?"),
    "a workflow that is not there": (
        ["team.workflow={type: custom, name: ech}"],
        "team.workflow.name",
        "'ech'",
        "did you mean 'echo'?",
    ),
    "a model folder that is not there": (
        ["policies.one.model=./nowhere"],
        "policies.one.model",
        "'./nowhere'",
        "give a folder with config.json and weights, or a hub name",
    ),
    "an override that is none": (["batch.groups"], "override 'batch.groups'", "batch.groups", "key.subkey=value"),
    "an override that is no YAML": (["seed=[1,"], "override 'seed=[1,'", "'[1,'", "put a text into quotes"),
    "a tool that cannot be called": (
        ["team.agents.solver.tools=[{type: calculator}]", "team.agents.solver.syntax={type: function, names: {a: b}}"],
        "team.agents.solver.syntax.names",
        "calculator",
        "add one, e.g. {calculator: calculator}",
    ),
    "a tool that is not there": (
        ["team.agents.solver.tools=[{type: abacus}]"],
        "team.agents.solver.tools.0.type",
        "'abacus'",
        "must be one of 'calculator'",
    ),
    "tasks on both sides": (["tasks.params={leak: true}"], "tasks", "'1+1'", "remove it from one of the two"),
    "a generator's parameter that is not there": (["tasks.params={leek: true}"], "tasks.params.leek", "'sums'", "leak"),
    "an agent that cannot be named so": (
        ["team.agents={'a b': {policy: one}}", "team.workflow={type: sequential, agents: [a b]}"],
        "team.agents",
        "'a b'",
        "use letters, digits and _",
    ),
    "a team without the agent of its workflow": (
        ["team.workflow={type: sequential, agents: [writer]}"],
        "team.workflow",
        "'writer'",
        "the team has solver",
    ),
    "a parser that is not there": (
        ["team.agents.solver.parser=intger"],
        "team.agents.solver.parser",
        "'intger'",
        "did you mean 'integer'?",
    ),
    "a lone episode": (["batch.episodes=1"], "batch.episodes", "is 1", "use batch.episodes=8"),
    "types that do not meet": (
        ["policies.one.training.dtype=bfloat16"],
        "policies.one.engine.dtype",
        "'bfloat16'",
        "set both to the same",
    ),
    "layers that the model does not have": (
        ["policies.one.training.lora={target_modules: [nope]}"],
        "policies.one.training.lora.target_modules",
        "'nope'",
        "check the target modules",
    ),
    "a device that is none": (
        ["cluster={backend: inline, device: gpu}"],
        "cluster.device",
        "'gpu'",
        "cpu, cuda or cuda:N",
    ),
}


@pytest.fixture
def config(small_run: Path) -> Path:
    return small_run


def run(*words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["flexmarl", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def test_the_config_is_right_before_it_is_broken(config, capsys, monkeypatch):
    code, said, errors = run("check", str(config), capsys=capsys, monkeypatch=monkeypatch)
    assert (code, errors) == (0, "")
    assert "The config is valid; nothing to do." in said


@pytest.mark.parametrize(("overrides", "key", "value", "works"), BROKEN.values(), ids=BROKEN)
def test_a_broken_config_is_explained(config, capsys, monkeypatch, overrides, key, value, works):
    code, _, errors = run("check", str(config), *overrides, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    (line,) = errors.splitlines()
    assert key in line
    assert value in line
    assert works in line


def test_every_problem_has_its_line(config, capsys, monkeypatch):
    broken = ["batch.grups=4", "steps=many", "mode=fast"]
    code, _, errors = run("check", str(config), *broken, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert [line.split()[2] for line in errors.splitlines()] == ["steps", "mode", "batch.grups"]


def test_problems_of_several_kinds_come_together(config, capsys, monkeypatch):
    broken = ["tasks.name=sum", "policies.one.model=./nowhere", "evaluate.tasks=0"]
    code, said, errors = run("check", str(config), *broken, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert [line.split(":")[2].strip() for line in errors.splitlines()] == ["tasks.name", "policies.one.model"]
    assert "devices" in said


def test_train_refuses_it_too_in_a_process_of_its_own(config):
    words = [sys.executable, "-c", "from flexmarl.cli import main; main()", "train", str(config), "batch.grups=4"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"flexmarl: {config}: batch.grups is not a setting (its value: 4); did you mean 'groups'?\n"
