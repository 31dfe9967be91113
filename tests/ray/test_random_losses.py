"""Random faults on the real processes of a run on three nodes: it ends as if undisturbed, and leaves nothing.

FLEXMARL_SEED    first seed of the deep runs, 0 by default
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.group_events import EpisodeFailed
from flexmarl.events.run_events import StepEnded
from flexmarl.events.serving_events import Moved, MoveFailed
from tests.ray import faulty_engine
from tests.ray.child_run import Child, Left
from tests.ray.conftest import Nodes
from tests.ray.losses import KINDS, RUNS, Losses, schedule, witnesses
from tests.ray.served import assert_same_bits, assert_served_once

pytestmark = pytest.mark.ray

FIRST = int(os.environ.get("FLEXMARL_SEED", "0"))
IN_CI = range(2)
DEEP = range(FIRST, FIRST + 40)
STEPS, CALLS = 3, 3 * 4 * 4 * 2 * 2
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 4, episodes: 4}"),
    *("evaluate.tasks=0", "team.workflow.name=talk", f"checkpoint.every={STEPS}"),
    "team.agents.solver.sampling.max_tokens=40",
    "team.agents.writer={policy: two, system: write, context: full, sampling: {max_tokens: 60}}",
    "policies.one={model: model, instances: 2, training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
    "policies.two={model: model, instances: 1, training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]
ON_NODES = [
    *("cluster.backend=ray", "cluster.node_timeout_s=5", "cluster.pools={training: {nodes: [head]}}"),
    *("rollout.workers=2", "balance={rule: drain_time, poll_s: 0.1, move_s: 0.1}"),
    "pool={replacements: 20, load_timeout_s: 8, abort_grace_s: 2, close_timeout_s: 2}",
]


def engines(faults: Path) -> list[str]:
    """Overrides: engines that break where a file of this folder says so."""
    engine = f"{{type: faulty, slots: 4, max_len: 192, faults: {faults}}}"
    code = f"code=[tasks.py, {Path(faulty_engine.__file__)}]"
    return [code, *(f"policies.{name}.engine={engine}" for name in ("one", "two"))]


@pytest.fixture(scope="module")
def undisturbed(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What every run must end with."""
    out = tmp_path_factory.mktemp("undisturbed")
    run = assemble_run(load_run(small_run, [*OVERRIDES, *engines(out / "none"), f"out={out}"]))
    run.train(Console(quiet=True))
    return Left(run.folder)


Play = Callable[[int], None]
"""Plays the run of a seed."""


@pytest.fixture
def play(small_run: Path, nodes: Nodes, tmp_path: Path, short_root: Path, undisturbed: Left) -> Iterator[Play]:
    """Plays the run with the seed's faults, and checks the laws on what is left of it."""
    faults = tmp_path / "faults"
    faults.mkdir()
    where = [f"cluster.address={nodes.address}", f"out={tmp_path}", *engines(faults)]
    child = Child("train", small_run, *OVERRIDES, *ON_NODES, *where, cwd=tmp_path, temp=short_root)

    def play(seed: int) -> None:
        losses = Losses(schedule(seed, calls=CALLS), nodes, faults, tmp_path)
        child.wait_for(losses.look)
        assert child.wait() == 0, f"{child.stderr}\n{losses.faults}"
        run = losses.run
        assert run is not None
        losses.observe(run.journal)
        child.footprint.pids |= losses.pids
        child.wait_until_gone()
        print(f"seed {seed}: {dict(witnesses(losses.faults, run, faults))}")
        assert_same_bits(undisturbed, run, steps=STEPS)
        assert_served_once(run)
        assert len(run.events(StepEnded)) == STEPS
        assert not run.events(EpisodeFailed)
        assert run.events(Moved, MoveFailed), "witness: instances moved"

    yield play
    child.close()


def test_a_few_runs_have_every_fault() -> None:
    for first in (0, RUNS, 7 * RUNS):
        drawn = [fault.kind for seed in range(first, first + RUNS) for fault in schedule(seed, calls=CALLS)]
        assert sorted(drawn) == sorted(KINDS)


@pytest.mark.parametrize("seed", IN_CI)
def test_faults_of_many_kinds_on_real_processes_change_nothing(seed: int, play: Play) -> None:
    play(seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", DEEP)
def test_forty_random_schedules_change_nothing(seed: int, play: Play) -> None:
    play(seed)
