"""Short runs of examples/plan_path, in this process: plain episodes, trees of turns, one policy for both agents."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from flexmarl import cli
from flexmarl.experience.store_file import read_store

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_path"
SMALL = [
    "steps=2",
    "batch.groups=4",
    "evaluate={tasks: 4}",
    "cluster={backend: inline, threads: 1}",
    "checkpoint.every=0",
]


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Runs `flexmarl train` on one of the example's configs; returns the run folder."""
    monkeypatch.chdir(tmp_path)

    def run(config: str, *overrides: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(EXAMPLE / config), *SMALL, *overrides])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr()
        assert not stopped.value.code, said.err
        return Path(said.out.splitlines()[-1])

    return run


@pytest.mark.parametrize(("config", "policies"), [("cpu.yaml", {"planner", "executor"}), ("shared.yaml", {"both"})])
def test_two_steps_train_every_policy(trained, config, policies):
    summary = json.loads((trained(config, "batch.episodes=2") / "summary.json").read_text())
    assert summary["policies"] == {policy: {"version": 2} for policy in policies}


def test_two_steps_of_a_tree_compare_calls_with_one_prompt(trained):
    folder = trained("tree.yaml", "team.workflow.candidates=3")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    prompts = defaultdict(list)
    with read_store(folder / "experience.sqlite") as store:
        for agent in store.agents:
            for row in store.rows(agent):
                prompts[agent, row.sample_id.split("_")[0], row.values["turn"]].append(
                    row.values["prompt_ids"].tobytes()
                )
    assert prompts
    for group in prompts.values():
        assert len(group) == 3
        assert len(set(group)) == 1
