"""Instances that move between policies under load, each a process on one of three nodes, while conversations go on."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.analysis.decided_again import compare_decisions, recorded
from flexmarl.assemble.blueprint import draw_up
from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.residents import STORE
from flexmarl.assemble.simulation import modelled, simulate
from flexmarl.config import RunSettings, load_run
from flexmarl.events.event import Events
from flexmarl.events.journal import read_run
from flexmarl.events.run_events import ProcessStarted, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import BalanceDecided, Called, InstanceLost, Moved, MoveFailed
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.inference.scaling import Move
from flexmarl.records import CONTROLLER, PolicyName
from flexmarl.simulator.modelled_store import SimulatedStore
from flexmarl.simulator.virtual_time import run_virtual
from tests.ray.child_run import Child, Left
from tests.ray.conftest import Nodes
from tests.ray.served import assert_moves_are_shown, assert_same_bits, assert_served_once, turns_of

pytestmark = pytest.mark.ray

STEPS = 3
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 6, episodes: 6}"),
    *("rollout={inter_query: 6, intra_query: 6}", "evaluate.tasks=0", "team.workflow.name=talk"),
    "team.agents.solver.sampling.max_tokens=24",
    "team.agents.writer={policy: two, system: write, context: full, sampling: {max_tokens: 60}}",
    "policies.one.instances=2",
    "policies.one.engine={type: embedded, slots: 4, max_len: 192}",
    "policies.two={model: model, instances: 1, engine: {type: embedded, slots: 4, max_len: 192}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]
"""The writer has twice the solver's work, a memory of its first reply, and half as many instances."""


@pytest.fixture
def child(small_run: Path, shared_nodes: Nodes, tmp_path: Path, short_root: Path) -> Iterator[Child]:
    """A run whose instances move, on three nodes, in a process of its own; what a failed test leaves of it is ended."""
    on_nodes = ["cluster.backend=ray", f"cluster.address={shared_nodes.address}", f"out={tmp_path}"]
    moves = "balance={rule: drain_time, poll_s: 0.1, move_s: 0.1}"
    child = Child("train", small_run, *OVERRIDES, *on_nodes, moves, cwd=tmp_path, temp=short_root)
    yield child
    child.close()


def test_moves_of_real_instances_under_load_lose_and_change_nothing(
    small_run: Path, child: Child, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same run in one process without moves has the same turns and the same credit."""
    alone = assemble_run(load_run(small_run, [*OVERRIDES, f"out={tmp_path_factory.mktemp('inline')}"]))
    alone.train(Console(quiet=True))
    still = Left(alone.folder)
    assert child.wait() == 0, child.stderr
    (path,) = tmp_path.glob("sums-*")
    run = Left(path)
    assert_same_bits(still, run, steps=STEPS)
    assert_served_once(run)
    moves = assert_moves_are_shown(run)
    assert {move.to for move in moves} == {"one", "two"}, "witness: instances have moved there and back"
    assert any(call.kept_tokens for call in run.events(Called)), "witness: a reply went on at another instance"
    rows = turns_of(run).values()
    assert sum(bool(row.values.get("parent")) for row in rows) == len(rows) / 4, "witness: conversations went on"
    assert {event.node for event in run.events(ProcessStarted)} == {"head", "left", "right"}
    assert not run.events(InstanceLost, WorkerLost, MoveFailed)
    costs = "{default: {origin: a test, engine: {slots: 4, decode_s: 0.01}}}"
    as_modelled = f"simulation={{nodes: 3, recorded: {path}, costs: {costs}}}"
    settings = load_run(RunFolder(path).config, ["cluster.backend=simulated", as_modelled, f"out={tmp_path}"])
    assert_decided_as_simulated(run, settings)
    assert_placed_as_simulated(run, settings)


def assert_decided_as_simulated(run: Left, settings: RunSettings) -> None:
    """From the loads that it recorded, the run's decisions are those of a simulation of its config, in every word."""
    for journal in (run.journal, read_run(RunFolder(simulate(settings)).journal)):
        decisions = compare_decisions(journal, settings.balance)
        assert {*decisions} == {"drain_time", "as_configured"}
        assert not any(one.first for one in decisions.values())
    decided = [move for event in run.events(BalanceDecided) for move in recorded(event).moves]
    made = [Move(event.instance, event.to, event.because) for event in run.events(Moved)]
    assert sorted(decided, key=str) == sorted(made, key=str)


def assert_placed_as_simulated(run: Left, settings: RunSettings) -> None:
    """A simulation with as many nodes gives every resident the node that it had, if the store's service has its own."""
    places = {event.process: event.node for event in run.events(ProcessStarted) if event.process != CONTROLLER}
    names = [*places]
    assert names[0] == STORE
    blueprint = draw_up(settings)
    store = SimulatedStore(agents=list(blueprint.team.agents), columns=TURN_COLUMNS)
    residents = modelled(settings, blueprint.team, store)

    async def placed() -> list[str]:
        async with residents.cluster(len(places), Events()) as cluster:
            service = replace(residents.trainer(PolicyName("one")), name=STORE, node=cluster.nodes[0].name)
            specs = [
                residents.engine(name.instance.policy, name.instance)
                if name.kind == "engine"
                else residents.trainer(PolicyName(name.policy))
                for name in names[1:]
            ]
            spawned = [*await cluster.spawn([service]), *await cluster.spawn(specs)]
            assert [resident.name for resident in spawned] == names
            return [resident.place.node for resident in spawned]

    as_real = {f"simulated-{number}": name for number, name in enumerate(("head", "left", "right"))}
    assert [as_real[node] for node in run_virtual(placed())] == [*places.values()]
