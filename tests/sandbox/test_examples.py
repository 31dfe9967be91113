"""Examples whose agents' code runs in boxes: their configs are right, and they train."""

import json
from pathlib import Path

import pytest

from tests.commands import run_commands

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("config", "todo"), [("cpu.yaml", b"nothing to do"), ("gpu.yaml", b"to do")])
def test_the_configs_of_the_code_team_are_right(config, todo, tmp_path, sandbox):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    (said,) = run_commands(("check", str(EXAMPLES / "code_team" / config)), cwd=tmp_path, environment=environment)
    assert said.returncode == 0, said.stderr
    assert todo in said.stdout


@pytest.mark.parametrize("workflow", ["code_team", "code_team_never_again", "code_team_shuffled_rewards"])
def test_the_code_team_trains(workflow, tmp_path, sandbox):
    small = ("steps=1", "batch.groups=2", "batch.episodes=4", "evaluate.tasks=4", f"team.workflow.name={workflow}")
    (said,) = run_commands(
        ("train", str(EXAMPLES / "code_team" / "cpu.yaml"), *small, f"out={tmp_path}/out"), cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    (folder,) = (tmp_path / "out").iterdir()
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert any("team/success" in step for step in steps)
