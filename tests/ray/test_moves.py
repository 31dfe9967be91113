"""Instances that move between policies while they serve, each a process: nothing is lost, the bits stay the same."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.run_events import ProcessStarted, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import InstanceLost, Moved
from flexmarl.records import InstanceId, PolicyName, WorkerId
from tests.ray.child_run import Child, Left, assert_same

pytestmark = pytest.mark.ray

STEPS = 3
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 6, episodes: 6}"),
    *("rollout={inter_query: 6, intra_query: 6}", "evaluate.tasks=0"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 90}}",
    "policies.one.instances=2",
    "policies.one.engine={type: embedded, slots: 4, max_len: 128}",
    "policies.two={model: model, instances: 1, engine: {type: embedded, slots: 4, max_len: 128}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]
"""The writer's replies take ten times as long as the solver's, and its policy has half as many instances."""


BALANCED = ["cluster.backend=ray", "balance={rule: drain_time, poll_s: 0.1}"]


@pytest.fixture(scope="module")
def still(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run in one process, without moves."""
    run = assemble_run(load_run(small_run, [*OVERRIDES, f"out={tmp_path_factory.mktemp('inline')}"]))
    run.train(Console(quiet=True))
    return Left(run.folder)


class Balanced:
    """A run whose instances move, in a process of its own."""

    def __init__(self, config: Path, folder: Path, temp: Path) -> None:
        self._folder = folder
        self.child = Child("train", config, *OVERRIDES, *BALANCED, f"out={folder}", cwd=folder, temp=temp)

    def wait_for(self, text: str) -> None:
        """Until the text is in the journal."""
        assert self.child.wait_for(lambda: text in self._journal()), self.child.stderr

    def finish(self) -> Left:
        assert self.child.wait() == 0, self.child.stderr
        self.child.wait_until_gone()
        return self.run

    @property
    def run(self) -> Left:
        (path,) = self._folder.glob("sums-*")
        return Left(path)

    def _journal(self) -> str:
        journals = [RunFolder(path).journal for path in self._folder.glob("sums-*")]
        return "".join(path.read_text() for path in journals if path.exists())


@pytest.fixture
def balanced(small_run: Path, tmp_path: Path, short_root: Path) -> Iterator[Balanced]:
    """A run that has begun; what a failed test leaves of it is ended."""
    run = Balanced(small_run, tmp_path, short_root)
    yield run
    run.child.close()


def test_moves_of_real_instances_lose_and_change_nothing(still: Left, balanced: Balanced) -> None:
    moving = balanced.finish()
    assert_same(still, moving, steps=STEPS)
    moves = moving.events(Moved)
    assert {move.to for move in moves} == {"one", "two"}, "witness: instances have moved there and back"
    assert all(move.because and move.seconds > 0 and move.expected_s > 0 for move in moves)
    assert not moving.events(InstanceLost, WorkerLost)


def test_a_process_that_dies_after_it_has_moved_is_lost_by_its_new_policy(still: Left, balanced: Balanced) -> None:
    balanced.wait_for('"event":"moved"')
    move = balanced.run.events(Moved)[0]
    os.kill(process_of(balanced.run, move.instance), signal.SIGKILL)
    run = balanced.finish()
    assert_same(still, run, steps=STEPS)
    (lost,) = run.events(WorkerLost)
    assert lost.process == WorkerId.engine(move.instance), "processes keep their names"
    (gone,) = run.events(InstanceLost)
    assert gone.instance in {one.became for one in run.events(Moved)}


def test_a_process_that_dies_while_it_serves_under_moves_loses_no_request(still: Left, balanced: Balanced) -> None:
    balanced.wait_for('"event":"step_started"')
    time.sleep(0.3)  # The first moves are being decided, or are under way.
    os.kill(process_of(balanced.run, InstanceId(PolicyName("one"), 0)), signal.SIGKILL)
    run = balanced.finish()
    assert_same(still, run, steps=STEPS)
    assert len(run.events(WorkerLost)) == 1


def process_of(run: Left, instance: InstanceId) -> int:
    """The process that had an instance at the beginning."""
    name = WorkerId.engine(instance)
    return next(started.pid for started in run.events(ProcessStarted) if started.process == name)
