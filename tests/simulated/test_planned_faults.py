"""A simulated run loses residents of each kind as a plan says, notices, and goes on; errors name file and field."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexmarl.analysis.costs import EngineCosts
from flexmarl.assemble.simulation import simulate
from flexmarl.cli import app
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import ConfigError
from flexmarl.events.event import Event
from flexmarl.events.journal import read_run
from flexmarl.events.run_events import CheckpointSaved, FaultStruck, Resumed, RunFailed, StepEnded, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import InstanceReplaced, Loaded
from flexmarl.records import InstanceId, PolicyName
from flexmarl.testing.faults.fault_plan import Fault, FaultKind, FaultPlan, read_plan
from flexmarl.testing.faults.planned import PlannedFaults, check_fits
from flexmarl.testing.faults.witness import seen_in

CONFIG = """
name: planned
steps: 3
mode: microbatch
cluster: {backend: simulated}
tasks: {type: generator, name: workload, params: {agents: {solver: 1.0, verifier: 1.0}, turns_min: 4, turns_max: 6}}
policies: {solver: {model: none, instances: 2}, verifier: {model: none, instances: 2}}
team:
  workflow: {type: custom, name: call_graph}
  agents: {solver: {policy: solver}, verifier: {policy: verifier}}
batch: {groups: 4, episodes: 2}
rollout: {episode_timeout_s: 500, call_timeout_s: 100}
credit: {filter: null}
evaluate: {tasks: 0}
checkpoint: {every: 1}
simulation:
  replies: {default: {type: asked}}
  costs: {default: {engine: {start_s: 5.0}}}
"""


def default_costs(policy: PolicyName) -> EngineCosts:
    """The costs of CONFIG's engines, but for the time that they take to start."""
    return EngineCosts()


def settings_of(folder: Path, *overrides: str) -> RunSettings:
    config = folder / "run.yaml"
    config.write_text(CONFIG)
    return load_run(config, [f"out={folder / 'runs'}", *overrides])


def played(folder: Path, *faults: Fault, overrides: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    settings = settings_of(folder, *overrides)
    return list(read_run(RunFolder(simulate(settings, disturbance=PlannedFaults(FaultPlan(faults=faults)))).journal))


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_lost_instance_is_noticed_through_its_process_and_replaced(tmp_path: Path) -> None:
    lost = Fault(kind=FaultKind.LOST_INSTANCE, target=InstanceId("solver", 0), after=1.0, how="at_once")
    events = played(tmp_path, lost)
    assert of(events, WorkerLost)[0].process == "engine/solver/0"
    assert of(events, InstanceReplaced)[0].replaces == "solver/0"
    assert len(of(events, StepEnded)) == 3
    assert seen_in(events, default_costs)[1] == {FaultKind.LOST_INSTANCE: 1}


def test_a_run_that_loses_a_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    lost = Fault(kind=FaultKind.LOST_TRAINER, target="verifier", after=3)
    events = played(tmp_path, lost, overrides=("simulation.restart_s=60",))
    (resumed,) = of(events, Resumed)
    assert resumed.step >= 1, "the step that was saved is not made again"
    assert resumed.t >= of(events, RunFailed)[0].t + 60
    assert sorted({event.step for event in of(events, StepEnded)}) == [0, 1, 2]
    assert seen_in(events, default_costs)[1] == {FaultKind.LOST_TRAINER: 1}


def test_a_run_that_loses_a_node_loses_all_that_lived_there_and_goes_on_on_the_others(tmp_path: Path) -> None:
    events = played(
        tmp_path,
        Fault(kind=FaultKind.LOST_NODE, target="simulated-1", after=2.0),
        overrides=("simulation.nodes=2", "pool.replacements=4"),
    )
    lost = of(events, WorkerLost)
    assert len(lost) == 3
    assert {event.node for event in lost} == {"simulated-1"}
    assert {event.process.split("/")[0] for event in lost} == {"engine", "trainer"}
    assert len(of(events, Resumed)) == 1
    assert sorted({event.step for event in of(events, StepEnded)}) == [0, 1, 2]
    assert seen_in(events, default_costs)[1] == {FaultKind.LOST_NODE: 1}


def test_a_run_survives_one_fault_of_every_other_kind(tmp_path: Path) -> None:
    faults = (
        Fault(kind=FaultKind.SLOW_INSTANCE, target=InstanceId("solver", 1), after=1.0, amount=10.0),
        Fault(kind=FaultKind.ENGINE_SILENCE, target=InstanceId("verifier", 1), after=2.0),
        Fault(kind=FaultKind.ENGINE_ERRORS, target="solver", after=5, amount=1.0),
        Fault(kind=FaultKind.FAILED_PUBLISH, target=InstanceId("verifier", 0), after=2, how="refused"),
        Fault(kind=FaultKind.STORE_FAILURE, after=40),
        Fault(kind=FaultKind.LOST_CONTROLLER, after=180, how="store_calls"),
        Fault(kind=FaultKind.TORN_CHECKPOINT, how="flipped"),
    )
    events = played(tmp_path, *faults)
    struck, _ = seen_in(events, default_costs)
    assert set(struck) >= {fault.kind for fault in faults} - {FaultKind.TORN_CHECKPOINT}
    assert sorted({event.step for event in of(events, StepEnded)}) == [0, 1, 2]


@pytest.mark.parametrize("decode_s", [0.001, 1.0])
def test_a_slow_instance_is_noticed_by_what_its_engine_takes(tmp_path: Path, decode_s: float) -> None:
    """At 1 ms or 1 s a token: a call counts if it took as long as an engine of these costs takes when slowed."""
    slow = Fault(kind=FaultKind.SLOW_INSTANCE, target=InstanceId("solver", 1), after=0.0, amount=20.0)
    never = Fault(kind=FaultKind.SLOW_INSTANCE, target=InstanceId("verifier", 1), after=0.0, amount=20.0)
    engine = EngineCosts(decode_s=decode_s, decode_request_s=0.0)
    costs = f"simulation.costs.default.engine={{decode_s: {decode_s}, decode_request_s: 0, start_s: 5}}"
    events = played(tmp_path, slow, overrides=(costs, "rollout={episode_timeout_s: 1e6, call_timeout_s: 1e6}"))
    assert seen_in(events, lambda policy: engine) == ({slow.kind: 1}, {slow.kind: 1})
    begun = FaultStruck(t=0.0, kind=never.kind, target=never.target, after=0.0, amount=never.amount, how="")
    assert seen_in([begun, *events], lambda policy: engine) == ({slow.kind: 2}, {slow.kind: 1}), "nobody slowed it"


def test_a_simulation_saves_where_the_config_says_so_and_nowhere_else(tmp_path: Path) -> None:
    assert [event.step for event in of(played(tmp_path), CheckpointSaved)] == [1, 2, 3]
    config = tmp_path / "silent.yaml"
    config.write_text(CONFIG.replace("checkpoint: {every: 1}\n", ""))
    folder = RunFolder(simulate(load_run(config, [f"out={tmp_path / 'runs'}"])))
    assert not of(list(read_run(folder.journal)), CheckpointSaved)


def test_weights_take_their_time_on_the_way(tmp_path: Path) -> None:
    def loads(*overrides: str) -> set[float]:
        events = of(played(tmp_path, overrides=overrides), Loaded)
        return {round(event.t - event.began, 6) for event in events}

    assert loads() == {0.0}
    weights = "simulation.costs.default.weights_gib=4"
    assert loads(weights) == {0.0}
    assert loads(weights, "simulation.transfers.gib_per_s=2", "simulation.transfers.latency_s=0.5") == {2.5}


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ("faults: 3", r"plan\.yaml: a plan is a list of faults under the key `faults`, got"),
        ("- lost", r"plan\.yaml: faults\[0\]: a fault is a mapping like .*, got 'lost'"),
        ("- {kind: meteor}", r"plan\.yaml: faults\[0\]\.kind: there is no kind 'meteor'; use one of lost_instance"),
        ("- {kind: store_failure, when: 3}", r"faults\[0\]\.when: there is no such field; use kind, target, after"),
        ("- {kind: store_failure, after: soon}", r"faults\[0\]\.after: it must be a number, got 'soon'"),
        ("- {kind: store_failure, after: -1}", r"faults\[0\]\.after: it must be at least 0, got -1"),
        (
            "- {kind: slow_instance, target: solver/0, after: 1}",
            r"faults\[0\]\.amount is missing: 'slow_instance' needs",
        ),
        (
            "- {kind: slow_instance, target: solver/0, amount: 0.5}",
            r"amount must be more than 1, got 0.5: it needs how",
        ),
        ("- {kind: clock_skew, target: solver}", r"amount is missing: 'clock_skew' needs the seconds by which"),
        ("- {kind: lost_instance}", r"faults\[0\]\.target is missing: 'lost_instance' needs an instance, as in"),
        ("- {kind: lost_instance, target: solver}", r"faults\[0\]\.target: an instance must look like 'solver/0', got"),
        ("- {kind: lost_instance, target: solver/0, how: x}", r"faults\[0\]\.how: 'lost_instance' has no 'x'; use"),
        ("- {kind: lost_trainer, target: judge, after: 1}", r"faults\[0\]\.target: there is no policy 'judge'"),
        ("- {kind: lost_node, target: node-7}", r"faults\[0\]\.target: there is no node 'node-7'; simulation.nodes"),
        ("- {kind: all_filtered, amount: 2}", r"faults\[0\]\.kind: a simulated run has its own workflow's rewards"),
    ],
)
def test_a_wrong_plan_is_refused_by_file_and_field(tmp_path: Path, plan: str, complaint: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    with pytest.raises(ConfigError, match=complaint):
        check_fits(read_plan(path), settings_of(tmp_path), str(path))


def test_a_plan_that_is_no_file_or_no_yaml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_plan(tmp_path / "nowhere.yaml")
    torn = tmp_path / "torn.yaml"
    torn.write_text("- {kind: [")
    with pytest.raises(ConfigError, match=r"torn\.yaml"):
        read_plan(torn)


def test_the_command_takes_a_plan_as_json_and_shows_what_was_noticed(tmp_path: Path) -> None:
    settings_of(tmp_path)
    plan = tmp_path / "plan.json"
    late = {"kind": "clock_skew", "target": "solver", "after": 10_000, "amount": 3}
    plan.write_text(json.dumps({"faults": [{"kind": "lost_instance", "target": "solver/0", "after": 1}, late]}))
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "run.yaml"), f"out={tmp_path}", "--faults", str(plan)])
    assert result.exit_code == 0, result.output
    assert result.output.split("lost_instance")[1].split()[:3] == ["1", "1", "1"]
    assert result.output.split("clock_skew")[1].split()[:3] == ["1", "0", "0"], "planned, but the run was over before"
