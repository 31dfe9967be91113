"""`flexmarl simulate`: one run, several, a sweep, and a run whose costs are fitted."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer import Typer
from typer.testing import CliRunner

from flexmarl.assemble.commands import assemble_run, evaluate_once
from flexmarl.assemble.export import export_policies
from flexmarl.cli import simulations
from flexmarl.cli.simulate import simulate
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, EngineError, EpisodeError, FlexmarlError
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder

app = Typer()
app.command()(simulate)

CONFIG: dict[str, Any] = {
    "name": "planned",
    "steps": 2,
    "tasks": {
        "type": "generator",
        "name": "workload",
        "params": {"agents": {"planner": 0.7, "writer": 0.3}, "turns_min": 4, "len_mean": 60, "len_cap": 400},
    },
    "policies": {
        policy: {"model": "none", "engine": {"type": "embedded", "slots": 4}} for policy in ("planner", "writer")
    },
    "team": {
        "workflow": {"type": "custom", "name": "call_graph"},
        "agents": {agent: {"policy": agent, "sampling": {"max_tokens": 500}} for agent in ("planner", "writer")},
    },
    "batch": {"groups": 3, "episodes": 4},
    "credit": {"filter": None},
    "evaluate": {"tasks": 0},
    "simulation": {
        "replies": {"default": {"type": "asked"}},
        "costs": {"default": {"origin": "made up for a test", "engine": {"slots": 4}}},
    },
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "planned.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"out": str(tmp_path / "runs")}))
    return path


def said(*arguments: str | Path) -> str:
    """What it prints; raises what it raises."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_is_simulated_whatever_its_backend_is(config: Path) -> None:
    text = said(config, "cluster.backend=simulated", "--steps", "1")
    assert "step 1 of 1 ended" in text
    assert "made up for a test" in text
    assert "step by lower bound" in text
    folder = Path(text.splitlines()[-1])
    for name in ("simulation.png", "timeline.json", "journal.jsonl", "config.yaml"):
        assert (folder / name).is_file(), name
    assert said(config, "steps=1").count("utilisation") == 1


def test_the_loads_of_a_run_decide_its_moves_again_and_other_rules_decide_otherwise(config: Path) -> None:
    crowded = ["policies.planner.instances=3", "rollout={inter_query: 3, intra_query: 4}", "pool.max_running=1"]
    folder = said(config, "balance={rule: drain_time, poll_s: 0.2, move_s: 0.1}", *crowded).splitlines()[-1]
    rows = [line.split() for line in said("--loads", folder).splitlines()]
    _, decisions, same, moves, again = next(row for row in rows if row[:1] == ["drain_time"])
    assert (decisions, moves) == (same, again)
    assert int(moves) > 0, "witness: instances have moved"
    text = said("--loads", folder, "balance.rule=none")
    assert "drain_time, the first that differs, at" in text
    assert "again: nothing" in text
    with pytest.raises(ConfigError, match=r"--loads takes the config of .* itself, got"):
        said("--loads", folder, config)
    still = said(config, "steps=1").splitlines()[-1]
    with pytest.raises(ConfigError, match="has no `balance_decided`"):
        said("--loads", still)


def test_another_world_is_an_error_that_names_the_key(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.backend=ray: `simulate` sets cluster\.backend=simulated"):
        said(config, "cluster.backend=ray")


def test_no_other_command_plays_on_modelled_devices(config: Path, tmp_path: Path) -> None:
    settings = load_run(config, ["cluster.backend=simulated"])
    for command in (
        lambda: assemble_run(settings),
        lambda: evaluate_once(settings, None),
        lambda: export_policies(settings, RunFolder(tmp_path), tmp_path / "export"),
    ):
        with pytest.raises(ConfigError, match="whose seconds are virtual; use `flexmarl simulate`"):
            command()


def test_configs_are_compared_with_the_first(config: Path) -> None:
    slow = config.with_name("slow.yaml")
    slow.write_text(yaml.safe_dump({"extends": config.name, "rollout": {"inter_query": 1}}))
    lines = said("--compare", config, slow, "steps=1").splitlines()
    (head,) = (line for line in lines if "ratios: to the first" in line)
    assert head.split()[-2:] == ["planned", "slow"]
    (steps,) = (line for line in lines if line.strip().startswith("step, mean"))
    assert float(steps.split()[-1].removesuffix("x")) > 1.2


def test_a_sweep_plays_every_combination_and_is_drawn(config: Path) -> None:
    text = said(config, "--sweep", "rollout.inter_query=1,3", "--sweep", "mode=sync,microbatch", "--steps", "1")
    rows = [line.split()[:2] for line in text.splitlines()]
    assert [row for row in rows if row[1:] in (["sync"], ["microbatch"])] == [
        ["1", "sync"],
        ["1", "microbatch"],
        ["3", "sync"],
        ["3", "microbatch"],
    ]
    (picture,) = (line.removeprefix("picture: ") for line in text.splitlines() if line.startswith("picture: "))
    assert Path(picture).is_file()


@pytest.mark.parametrize("sweep", ["steps", "steps=", "=1,2", "steps=[1"])
def test_a_sweep_without_key_or_values_is_an_error(config: Path, sweep: str) -> None:
    with pytest.raises(ConfigError, match="--sweep takes KEY=V1,V2"):
        said(config, "--sweep", sweep)


def test_a_sweep_of_a_key_that_there_is_not_names_it(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.inter_qeury"):
        said(config, "--sweep", "rollout.inter_qeury=1,2")


def test_a_sweep_of_a_thousand_runs_is_an_error(config: Path) -> None:
    many = ",".join(map(str, range(1, 12)))
    with pytest.raises(ConfigError, match="121 combinations"):
        said(config, "--sweep", f"steps={many}", "--sweep", f"seed={many}")


def test_costs_fitted_to_a_run_replay_it(config: Path) -> None:
    recorded = Path(said(config, "tasks.params.tool_mean_s=0").splitlines()[-1])
    text = said("--fit", recorded)
    (steps,) = (line for line in text.splitlines() if line.strip().startswith("step, mean"))
    assert 0.95 <= float(steps.split()[-1].removesuffix("x")) <= 1.05
    extending = config.with_name("again.yaml")
    extending.write_text(yaml.safe_dump({"extends": [config.name, str(recorded / "fitted.yaml")]}))
    simulation = load_run(extending).simulation
    assert simulation.costs["planner"].origin == f"fitted to the journal of {recorded}"
    assert simulation.replies == load_run(config).simulation.replies


@pytest.mark.parametrize("configured", [1, 6])
def test_a_replay_has_as_many_steps_as_the_run_made_whatever_its_config_says(config: Path, configured: int) -> None:
    recorded = Path(said(config, "tasks.params.tool_mean_s=0", "steps=3").splitlines()[-1])
    written = (recorded / "config.yaml").read_text()
    (recorded / "config.yaml").write_text(written.replace("steps: 3\n", f"steps: {configured}\n"))

    def replayed(*words: str) -> int:
        folder = Path(said("--fit", recorded, *words).splitlines()[-1].removeprefix("simulation: "))
        return max(read_metrics(folder / "metrics.jsonl"))

    assert replayed() == 3
    assert replayed("steps=2") == 2


def test_a_fit_has_the_slots_that_were_simulated_and_says_where_it_is(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    slots = "simulation.costs.default.engine.slots=2"
    recorded = Path(said(config, "out=runs", slots, "tasks.params.tool_mean_s=0").splitlines()[-1])
    recorded = recorded.relative_to(config.parent) if recorded.is_absolute() else recorded
    written = (recorded / "fitted.yaml").absolute()
    assert f"extends: [run.yaml, {written}]" in said("--fit", recorded)
    fitted = yaml.safe_load(written.read_text())["simulation"]["costs"]
    assert {costs["engine"]["slots"] for costs in fitted.values()} == {2}


def test_a_poor_fit_and_a_failure_with_it_are_said_in_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Path(said(config, "tasks.params.tool_mean_s=0").splitlines()[-1])
    assert "caution" not in said("--fit", recorded)
    monkeypatch.setattr(simulations, "MOST_ERROR", -1.0)
    (caution,) = (line for line in said("--fit", recorded).splitlines() if line.startswith("caution: "))
    assert re.search(
        r"the fit is poor \(off by \d+% in calls of 'planner', .*% in the mean step\): .*; fit a longer run", caution
    )

    def fail(*_: Any) -> None:
        raise EngineError("no instance of 'planner' serves version 4")

    monkeypatch.setattr(simulations, "simulated", fail)
    with pytest.raises(FlexmarlError, match=r"costs fitted to .*: no instance .*; do not extend .*fitted.yaml"):
        said("--fit", recorded)


def test_a_simulation_without_steps_names_the_key(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps is 0, .*; use at least 1"):
        said(config, "steps=0")


def test_fitting_needs_a_run_folder(config: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        said("--fit", config.parent)
    with pytest.raises(ConfigError, match="--fit simulates"):
        said(config, "--fit", config.parent)


def test_one_config_is_needed_and_two_to_compare(config: Path) -> None:
    with pytest.raises(ConfigError, match="takes one CONFIG"):
        said("steps=1")
    with pytest.raises(ConfigError, match="needs two YAML files"):
        said("--compare", config)
    with pytest.raises(ConfigError, match="exclude each other"):
        said("--compare", config, "--sweep", "steps=1,2")


MEANINGLESS = [
    "team.workflow={type: sequential, agents: [planner, writer]}",
    "simulation.replies={default: {type: lengths, mean: 30}}",
    "credit={}",
]


def test_a_simulation_whose_rewards_are_equal_says_so_and_draws_them_where_asked(config: Path) -> None:
    """B12."""
    text = said(config, *MEANINGLESS)
    caution = "caution: 6 of 6 groups were dropped, because their rewards did not differ (too_hard)"
    assert caution in " ".join(text.split())
    assert "simulation.rewards={success: 0.5}" in text
    with pytest.raises(
        EpisodeError, match=r"because: credit.filter found it too_hard; .*simulation.rewards=\{success: 0"
    ):
        said(config, *MEANINGLESS, "mode=async")
    with pytest.raises(EpisodeError, match=r"credit\.filter found it too_easy") as alike:
        said(config, *MEANINGLESS, "mode=async", "simulation.rewards={success: 1.0, spread: 0.0}")
    assert "simulation.rewards" not in str(alike.value), "they are drawn already"
    assert alike.value.__cause__ is not alike.value, "it is no cause of its own"
    drawn = said(config, *MEANINGLESS, "simulation.rewards={success: 0.5}")
    assert "caution" not in drawn
    steps = [read_metrics(RunFolder(Path(one.splitlines()[-1])).metrics)[1] for one in (text, drawn)]
    assert ["train/planner/samples" in values for values in steps] == [False, True]


def test_the_folder_of_a_simulation_says_that_it_is_one(config: Path) -> None:
    """B20."""
    folder = Path(said(config, "steps=1").splitlines()[-1])
    assert folder.name.startswith("sim-planned-")
    assert yaml.safe_load((folder / "config.yaml").read_text())["name"] == "planned"
