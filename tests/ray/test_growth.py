"""Engines that start and end in the middle of a run: further ones on free nodes, and moves between unlike ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.event import Event
from flexmarl.events.run_events import ProcessEnded, ProcessStarted, WorkerLost
from flexmarl.events.serving_events import Called, GrowthFailed, InstanceGrown, InstanceLost, Moved
from flexmarl.records import WorkerId
from tests.ray.child_run import Child, Left, assert_same, count_journalled
from tests.ray.conftest import Nodes

pytestmark = pytest.mark.ray

STEPS = 3
HELD = 2
"""The step that does not begin before an engine has been started: a start takes seconds, how many nobody knows."""
HELD_CODE = '''
import asyncio
from pathlib import Path

from flexmarl.agents import workflow


@workflow("held")
async def held(task, team):
    """Digits are good, as in echo. Tasks from FIRST on wait for a file."""
    while int(task.reference) >= FIRST and not Path(UNTIL).exists():
        await asyncio.sleep(0.05)
    digits = 0
    for seat in team:
        digits = sum(letter.isdigit() for letter in (await seat.act(task.prompt)).text)
        seat.reward(digits / 8)
    team.report(success=digits / 8)
'''
GROUPS = 4
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", f"batch={{groups: {GROUPS}, episodes: 4}}"),
    *("evaluate.tasks=0", f"checkpoint.every={STEPS}"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 60}}",
    "policies.one={model: model, instances: 2, engine: {type: embedded, slots: 4, max_len: 128}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
    "policies.two={model: model, instances: 1, engine: {type: embedded, slots: 2, max_len: 128, threads: 2}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]
"""The writer's replies take ten times as long as the solver's, and its engines have other threads."""


def held(folder: Path, until: Path) -> list[str]:
    """Overrides: from the held step on, episodes wait for the file `until`."""
    code = folder / "held.py"
    code.write_text(f"{HELD_CODE}\nFIRST, UNTIL = {HELD * GROUPS}, {str(until)!r}\n")
    return [f"code=[tasks.py, {code}]", "team.workflow.name=held"]


@pytest.fixture(scope="module")
def still(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run in one process, without moves."""
    folder = tmp_path_factory.mktemp("inline")
    run = assemble_run(load_run(small_run, [*OVERRIDES, *held(folder, until=folder), f"out={folder}"]))
    run.train(Console(quiet=True))
    return Left(run.folder)


@pytest.fixture
def begun() -> Iterator[list[Child]]:
    """Runs that a test has begun; what is left of them is ended."""
    children: list[Child] = []
    yield children
    for child in children:
        child.close()


def played(begun: list[Child], config: Path, folder: Path, temp: Path, *how: str, until: type[Event]) -> Left:
    """A run that goes on from the held step once `until` has happened."""
    happened = folder / "happened"
    words = [*OVERRIDES, *held(folder, until=happened), "cluster.backend=ray", *how, f"out={folder}"]
    child = Child("train", config, *words, cwd=folder, temp=temp)
    begun.append(child)
    assert child.wait_for(lambda: count_journalled(until.name, folder)), child.stderr
    happened.touch()
    assert child.wait() == 0, child.stderr
    (path,) = folder.glob("sums-*")
    return Left(path)


def test_a_policy_grows_on_free_nodes_and_the_bits_stay_the_same(
    still: Left, small_run: Path, shared_nodes: Nodes, tmp_path: Path, short_root: Path, begun: list[Child]
) -> None:
    """Three nodes with three CPUs each have room for three engines beside six residents."""
    joins = f"cluster.address={shared_nodes.address}"
    grows = "balance={rule: queue_gap, gap: 99, poll_s: 0.1, grow: true, start_s: 0.1}"
    run = played(begun, small_run, tmp_path, short_root, joins, grows, until=InstanceGrown)
    assert_same(still, run, steps=STEPS)
    grown = run.events(InstanceGrown)
    assert 1 <= len(grown) <= 3
    assert all("drains last, in" in event.because and event.seconds > 0 for event in grown)
    served = {call.instance for call in run.events(Called)}
    assert {event.instance for event in grown} & served, "witness: it has answered calls"
    started = {event.process for event in run.events(ProcessStarted)}
    assert {event.process for event in grown} <= started
    assert not run.events(InstanceLost, WorkerLost, GrowthFailed)


def test_unlike_engines_move_by_an_end_and_a_start_on_a_full_private_ray(
    still: Left, small_run: Path, tmp_path: Path, short_root: Path, begun: list[Child]
) -> None:
    moves = "balance={rule: drain_time, poll_s: 0.1, start_s: 0.1}"
    run = played(begun, small_run, tmp_path, short_root, moves, until=Moved)
    begun[0].wait_until_gone()
    assert_same(still, run, steps=STEPS)
    made = run.events(Moved)
    assert made, "witness"
    assert all(move.starts and move.because and move.seconds > 0 for move in made)
    ended = {event.process for event in run.events(ProcessEnded)}
    assert {WorkerId.engine(move.instance) for move in made} <= ended
    assert not run.events(InstanceLost, WorkerLost)
