"""Simulated runs whose policies grow into modelled room, and whose unlike engines end and start where they move."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.assemble.simulation import simulate
from flexmarl.config import load_run
from flexmarl.events.event import Event
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called, InstanceGrown, InstanceLost, Moved

CONFIG = """
name: grows
steps: 2
mode: sync
cluster: {backend: simulated}
tasks: {type: generator, name: workload, params: {agents: {solver: 0.8, judge: 0.2}, turns_min: 4, turns_max: 6}}
policies: {solver: {model: none, instances: 2}, judge: {model: none, instances: 2}}
team:
  workflow: {type: custom, name: call_graph}
  agents:
    solver: {policy: solver, sampling: {max_tokens: 4096}}
    judge: {policy: judge, sampling: {max_tokens: 4096}}
batch: {groups: 16, episodes: 4}
rollout: {inter_query: 16, intra_query: 4, episode_timeout_s: 36000, call_timeout_s: 36000}
pool: {max_running: 4}
balance: {rule: drain_time, poll_s: 1.0, grow: true, start_s: 5.0}
credit: {filter: null}
evaluate: {tasks: 0}
checkpoint: {every: 0}
simulation:
  room: 3
  replies: {default: {type: asked}}
  costs: {default: {engine: {slots: 4, decode_s: 0.01, decode_request_s: 0.002, start_s: 8.0, load_s: 1.0}}}
"""


def simulated(folder: Path, *overrides: str, said: list[str] | None = None) -> list[Event]:
    config = folder / "run.yaml"
    config.write_text(CONFIG)
    settings = load_run(config, [f"out={folder / 'runs'}", *overrides])
    show: Any = (lambda line: None) if said is None else said.append
    return list(read_run(RunFolder(simulate(settings, show=show)).journal))


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def step_s(facts: Facts) -> float:
    return facts.makespan_s / len(facts.steps)


def test_a_simulated_run_grows_into_its_room_after_the_modelled_start_and_ends_sooner(tmp_path: Path) -> None:
    events = simulated(tmp_path)
    grown = of(InstanceGrown, events)
    assert len(grown) == 3, "as many as there is room for"
    assert all(event.because and event.expected_s for event in grown)
    assert [event.seconds for event in grown] == pytest.approx([8.0 + 1.0] * 3), "start_s, and the load of the weights"
    assert not of(InstanceLost, events)
    without = simulated(tmp_path, "balance.grow=false")
    assert not of(InstanceGrown, without)
    assert len(of(Called, events)) == len(of(Called, without)), "the same calls, each answered once"
    assert step_s(read_facts(events)) < 0.9 * step_s(read_facts(without))


def test_a_simulated_run_that_grows_is_the_same_again(tmp_path: Path) -> None:
    assert simulated(tmp_path) == simulated(tmp_path)


def test_without_room_the_run_says_why_nothing_is_added(tmp_path: Path) -> None:
    said: list[str] = []
    events = simulated(tmp_path, "simulation.room=0", said=said)
    assert not of(InstanceGrown, events)
    assert said[0] == (
        "balance.grow is true, but simulation.room is 0, so that no modelled engine has room beside the configured "
        "ones; no instance is added until room is free"
    )


def test_unlike_engines_move_by_an_end_and_a_start(tmp_path: Path) -> None:
    moves = of(Moved, simulated(tmp_path, "policies.judge.engine={type: timed}", "balance.grow=false"))
    assert moves, "witness"
    assert all(move.starts and move.because for move in moves)
    assert min(move.seconds for move in moves) >= 8.0 + 1.0
    alike = of(Moved, simulated(tmp_path, "balance.grow=false"))
    assert not any(move.starts for move in alike)
