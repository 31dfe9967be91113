"""Examples whose agents' code runs in boxes: their configs are right, and they train."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.commands import run_commands

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("steps=1", "batch.groups=2", "batch.episodes=4", "cluster.threads=1")


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the journal of a run."""
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


@pytest.mark.parametrize(
    ("example", "agents"),
    [
        ("code_team", ("coder", "tester")),
        ("sql_team", ("writer", "checker")),
        ("search_team", ("searcher", "answerer")),
    ],
)
def test_a_simulation_of_recorded_replies_scores_and_calls_for_real(example, agents, tmp_path, sandbox):
    train = ("train", str(EXAMPLES / example / "cpu.yaml"), *SMALL, "evaluate.tasks=0", f"out={tmp_path}/out")
    (said,) = run_commands(train, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    (folder,) = (tmp_path / "out").iterdir()
    (fitted,) = run_commands(("simulate", "--fit", str(folder)), cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert b"episodes failed" not in fitted.stdout
    (simulation,) = (found for found in (tmp_path / "out").iterdir() if found != folder)
    earned = [{str(one["groups"]): one["parts"] for one in events_of(run, "credited")} for run in (folder, simulation)]
    assert earned[0] == earned[1]
    assert earned[0]
    assert all(parts.keys() >= set(agents) for parts in earned[0].values())


def test_the_configs_of_examples_with_boxes_are_right(tmp_path, sandbox):
    todo = {
        f"{example}/{config}": found
        for example in ("code_team", "sql_team")
        for config, found in (("cpu.yaml", b"nothing to do"), ("gpu.yaml", b"to do"))
    }
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    checks = [("check", str(EXAMPLES / config)) for config in todo]
    for config, said in zip(todo, run_commands(*checks, cwd=tmp_path, environment=environment), strict=True):
        assert said.returncode == 0, (config, said.stderr)
        assert todo[config] in said.stdout, config


def test_the_code_team_trains_in_each_of_its_workflows(tmp_path, sandbox):
    workflows = ("code_team", "code_team_never_again", "code_team_shuffled_rewards")
    train = ("train", str(EXAMPLES / "code_team" / "cpu.yaml"), *SMALL, "evaluate.tasks=4")
    runs = [(*train, f"team.workflow.name={workflow}", f"out={tmp_path}/{workflow}") for workflow in workflows]
    for workflow, said in zip(workflows, run_commands(*runs, cwd=tmp_path), strict=True):
        assert said.returncode == 0, (workflow, said.stderr)
        (folder,) = (tmp_path / workflow).iterdir()
        steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        assert any("team/success" in step for step in steps), workflow


def test_a_run_that_is_killed_while_tools_run_in_boxes_ends_with_the_bits_of_an_undisturbed_one(tmp_path, sandbox):
    """A query's answer is a function of the query, so the episodes that are played again are the same."""
    small = ("steps=2", *SMALL[1:], "evaluate.tasks=0", "checkpoint.every=1")
    train = ("train", str(EXAMPLES / "sql_team" / "cpu.yaml"), *small, "deterministic=true")
    (straight,) = run_commands((*train, f"out={tmp_path}/straight"), cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    out = tmp_path / "killed"
    killed = subprocess.Popen([sys.executable, "-m", "flexmarl", *train, f"out={out}"], stdout=subprocess.DEVNULL)
    while not (boxes := boxes_after_the_first_step(out, killed.pid)):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    (folder,) = out.iterdir()
    assert not (folder / "checkpoints" / "step-00002").exists(), f"killed too late: {boxes}"
    (resumed,) = run_commands(("train", str(folder / "config.yaml"), "--resume", str(folder)), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (undisturbed,) = (tmp_path / "straight").iterdir()
    for policy in ("writer", "checker"):
        expected, found = (
            load_file(run / "checkpoints" / "step-00002" / policy / "weights.safetensors")
            for run in (undisturbed, folder)
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        before = load_file(undisturbed / "checkpoints" / "step-00001" / policy / "weights.safetensors")
        assert any(not torch.equal(expected[name], before[name]) for name in expected), "the last step trains"


def boxes_after_the_first_step(out: Path, pid: int) -> list[psutil.Process]:
    """The boxes of a run that are open now; none before its first checkpoint is there."""
    if not list(out.glob("*/checkpoints/step-00001/*/weights.safetensors")):
        return []
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # It has ended since.
            found += [one] if one.name() == "bwrap" else []
    return found
