"""The configs of the paper's tables: what is compared has the same devices and the same work."""

from pathlib import Path

import pytest

from flexmarl.analysis.costs import costs_of
from flexmarl.config import RunSettings, load_run
from flexmarl.orchestrator.settings import Mode

PAPER = Path(__file__).parents[3] / "examples" / "paper"
CONFIGS = sorted(path for folder in ("ma", "ca", "table_4") for path in (PAPER / folder).glob("*.yaml"))
CELLS = [path for path in CONFIGS if path.parent.name != "table_4"]
DEVICES = {"ma": 104, "ca": 108}


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def rollout_devices(settings: RunSettings) -> int:
    costs = settings.simulation.costs
    return sum(policy.instances * costs_of(costs, name).engine.devices for name, policy in settings.policies.items())


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_a_config_is_right_and_every_agent_has_a_share(path: Path):
    settings = load_run(path)
    agents = settings.tasks.model_dump()["params"]["agents"]
    assert set(agents) == set(settings.team.agents) == set(settings.policies)
    assert sum(agents.values()) == pytest.approx(1.0, abs=0.002)
    assert agents["a"] + agents["b"] == pytest.approx(0.765, abs=0.001), "the paper: two agents get over 76%"


@pytest.mark.parametrize("path", CELLS, ids=name)
def test_every_system_has_the_devices_of_its_data_set(path: Path):
    settings, there = load_run(path), DEVICES[path.parent.name]
    trainers = max(costs_of(settings.simulation.costs, name).trainer.devices for name in settings.policies)
    if settings.mode is Mode.COLOCATED:
        assert rollout_devices(settings) <= there
        assert trainers <= there / len(settings.policies)
    else:
        # The synchronous systems have as many training devices and use those of one policy at a time.
        at_once = load_run(path.with_stem("flexmarl")).process_groups.at_once
        assert at_once
        assert rollout_devices(settings) + at_once * trainers == there


@pytest.mark.parametrize("data", ["ma", "ca"])
def test_all_systems_of_a_data_set_play_the_same_workload(data: str):
    runs = [load_run(path) for path in CELLS if path.parent.name == data]
    assert len(runs) == 7
    for run in runs:
        assert (run.seed, run.tasks, run.team, run.batch) == (runs[0].seed, runs[0].tasks, runs[0].team, runs[0].batch)


@pytest.mark.parametrize("data", ["ma", "ca"])
def test_ours_differs_from_the_papers_system_in_rules_alone(data: str):
    paper, ours = (load_run(PAPER / data / f"{system}.yaml") for system in ("flexmarl", "ours"))
    rules = {"name", "balance", "process_groups", "pipeline"}
    assert paper.model_dump(exclude=rules) == ours.model_dump(exclude=rules)
    assert ours.mode.synchronous, "every token is sampled at its step's version, as in the paper's system"
    assert paper.process_groups.at_once == ours.process_groups.at_once
