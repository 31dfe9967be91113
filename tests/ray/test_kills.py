"""kill -9 of any process at any moment: the run goes on or says what to do, nothing is left of it, nothing is lost.

FLEXMARL_KILLS   kills of each kind, 1 by default
FLEXMARL_SEED    seed of the first one; it decides the moment
"""

import json
import os
import random
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flexmarl import cli
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.run_events import ProcessStarted, Resumed, RunFailed, StepEnded, StepStarted, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import InstanceReplaced, QueueCounts
from flexmarl.records import RowState
from flexmarl.records.ids import split_sample_id, split_trajectory_id
from flexmarl.records.lifecycle import ROW_TERMINAL
from tests.ray.child_run import Child, Left, assert_same, count_journalled

pytestmark = pytest.mark.ray

FIRST = int(os.environ.get("FLEXMARL_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("FLEXMARL_KILLS", "1")))
STEPS, GROUPS, EPISODES = 4, 4, 4
OVERRIDES = [
    "deterministic=true",
    "cluster.threads=1",
    f"steps={STEPS}",
    f"batch={{groups: {GROUPS}, episodes: {EPISODES}}}",
    "team.agents.solver.sampling.max_tokens=32",
    "policies.one.training.micro_batch=4",
    "checkpoint.every=1",
]
ATTEMPTS = 5
START_S = 8.0
"""About what a run takes until its processes are there; a moment after that hits whatever comes next."""
MOMENTS = {
    "training": ("micro_batch", STEPS * GROUPS // 2),
    "publish": ("updated", STEPS),
    "checkpoint": ("step_ended", STEPS),
    "rollout": ("call", STEPS * GROUPS * EPISODES),
    "before a step": ("step_started", STEPS),
}
"""What is going on after which event, and at least how often that happens in a run."""
START = "start"


@dataclass(frozen=True)
class Moment:
    """When to kill: so long after the n-th event of that name, or after the process began."""

    phase: str
    event: str
    nth: int
    after_s: float

    @classmethod
    def draw(cls, seed: int, phases: Sequence[str]) -> "Moment":
        """The phases take turns, so that few kills hit all of them; the rest is chance."""
        dice, phase = random.Random(seed), phases[seed % len(phases)]
        if phase == START:
            return cls(phase, "", 0, dice.uniform(0, START_S))
        event, times = MOMENTS[phase]
        return cls(phase, event, dice.randint(1, times), dice.uniform(0, 0.005))

    def __str__(self) -> str:
        return f"{self.phase}{f', {self.event} {self.nth}' if self.nth else ''} + {1000 * self.after_s:.0f} ms"


class Doomed:
    """A run that is to be killed, and all that comes after it."""

    def __init__(self, config: Path, folder: Path, temp: Path) -> None:
        self._folder, self._temp = folder, temp
        folder.mkdir()
        self.child = self._start(config, *OVERRIDES, "cluster.backend=ray", f"out={folder}")

    def resume(self) -> Child:
        """Goes on in a process of its own."""
        self.child.close()
        self.child = self._start(RunFolder(self.run.path).config, "--resume", self.run.path)
        return self.child

    def _start(self, *words: object) -> Child:
        return Child("train", *words, cwd=self._folder, temp=self._temp)

    @property
    def has_begun(self) -> bool:
        """There is what a resume needs."""
        return any(RunFolder(path).config.is_file() for path in self._folder.glob("sums-*"))

    @property
    def run(self) -> Left:
        """What it wrote; once it has begun."""
        (path,) = self._folder.glob("sums-*")
        return Left(path)

    def wait(self, moment: Moment) -> bool:
        """Until the moment; False if the run ended before it."""
        if moment.event:
            if not self.child.wait_for(lambda: count_journalled("run_started", self._folder), observing=True):
                return False
            self._observe()
            if not self.child.wait_for(lambda: count_journalled(moment.event, self._folder) >= moment.nth):
                return False
        began = time.monotonic()
        return self.child.wait_for(lambda: time.monotonic() - began > moment.after_s, observing=not moment.event)

    def _observe(self) -> None:
        footprint = self.child.footprint
        footprint.observe()
        assert {one.pid for one in self.run.events(ProcessStarted)} <= footprint.pids.keys()
        assert footprint.ports, "witness: Ray listens"
        assert footprint.leases, "witness: there are folders to remove"

    def pid_of(self, role: str) -> int:
        """The live process of that role: `controller`, `engine` or `trainer`."""
        if role == "controller":
            return self.child.process.pid
        return [one.pid for one in self.run.events(ProcessStarted) if one.process.startswith(role)][-1]

    def phase(self) -> str:
        """Where it stands, by its journal."""
        journal = [one for one in self.run.journal if not isinstance(one, QueueCounts)] if self.has_begun else []
        step = sum(isinstance(one, StepStarted) for one in journal)
        return f"in step {step}, after {journal[-1].name}" if journal else "before its first event"


Kill = Callable[[str, int], tuple[Doomed, int, str]]
"""Role and seed to what was killed, its pid, and when that was."""


@pytest.fixture(scope="module")
def undisturbed(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What every run must end with."""
    out = tmp_path_factory.mktemp("undisturbed")
    run = assemble_run(load_run(small_run, [*OVERRIDES, "cluster.backend=inline", f"out={out}"]))
    run.train(Console(quiet=True))
    return Left(run.folder)


@pytest.fixture
def kill(small_run: Path, tmp_path: Path, short_root: Path, request: pytest.FixtureRequest) -> Iterator[Kill]:
    """Starts runs until one is hit at its moment, and kills the process of a role there."""
    started: list[Doomed] = []

    def kill(role: str, seed: int) -> tuple[Doomed, int, str]:
        moment = Moment.draw(seed, [*MOMENTS, START, START] if role == "controller" else [*MOMENTS])
        while len(started) < ATTEMPTS:
            doomed = Doomed(small_run, tmp_path / str(len(started)), short_root)
            started.append(doomed)
            if doomed.wait(moment) and (pid := doomed.pid_of(role)) in psutil.pids():
                os.kill(pid, signal.SIGKILL)
                return doomed, pid, f"{request.node.name}: {moment}: {doomed.phase()}"
            doomed.child.wait()
        raise AssertionError(f"{ATTEMPTS} runs ended before they could be killed")

    yield kill
    for doomed in started:
        doomed.child.close()


def assert_store_whole(run: Left) -> None:
    """The file is intact, every row in a state, and all rows of the steps that ended are trained or never will be."""
    path = RunFolder(run.path).store
    if not path.exists():
        assert not run.events(StepStarted)
        return
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    trained: Counter[int] = Counter()
    for _, sample, _, _, settled, state, *_ in run.consumed():
        group, _, _ = split_trajectory_id(split_sample_id(sample)[2])
        assert state in RowState
        trained[group] += state == RowState.TRAINED and settled == group // GROUPS + 1
    for step in run.events(StepEnded):
        assert [trained[group] for group in step.trained] == [EPISODES] * len(step.trained)


def assert_readable(doomed: Doomed) -> None:
    """`flexmarl store` answers while the run, which waits for another engine, writes."""
    select = "SELECT count(*) AS rows FROM solver"
    said = CliRunner().invoke(cli.app, ["store", str(doomed.run.path), select, "--json"], catch_exceptions=False)
    assert json.loads(said.stdout)[0]["rows"] > 0
    assert doomed.child.process.poll() is None, "witness: the run still runs"


def assert_resumes(doomed: Doomed, undisturbed: Left) -> str:
    """Goes on from the newest checkpoint to the end of an undisturbed run, and says so."""
    saved = sorted(RunFolder(doomed.run.path).checkpoints.glob("step-*"))
    step = int(saved[-1].name.removeprefix("step-")) if saved else 0
    child = doomed.resume()
    assert child.wait() == 0, child.stderr
    assert child.stderr == ""
    said = " ".join(child.stdout.split())
    assert f"going on after step {step}" in said
    assert saved or "the run has no checkpoint: it begins again at step 0" in said
    assert doomed.run.events(Resumed)[-1].step == step
    assert_ended_well(doomed, undisturbed)
    return f"resumed after step {step}"


def assert_ended_well(doomed: Doomed, undisturbed: Left) -> None:
    """As if nothing had happened: same rows, same bits, same files, and nothing else is left."""
    child, run = doomed.child, doomed.run
    child.wait_until_gone()
    assert_store_whole(run)
    assert {row[5] for row in run.consumed()} <= ROW_TERMINAL
    assert_same(undisturbed, run, steps=STEPS)
    names = [{path.name for path in one.path.iterdir()} for one in (run, undisturbed)]
    assert names[0] == names[1]
    assert not list(RunFolder(run.path).checkpoints.glob(".*"))


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_of_the_controller_leaves_nothing_and_resume_ends_as_if_undisturbed(seed, kill: Kill, undisturbed: Left):
    doomed, _, note = kill("controller", seed)
    assert doomed.child.wait() == -signal.SIGKILL, "witness: it was hit"
    seconds = doomed.child.wait_until_gone()
    outcome = "there was no run yet"
    if doomed.has_begun:
        assert_store_whole(doomed.run)
        outcome = assert_resumes(doomed, undisturbed)
    print(f"{note}; nothing left after {seconds:.1f} s; {outcome}")


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_of_an_engine_is_made_up_for_by_another_one_while_the_store_is_read(seed, kill: Kill, undisturbed: Left):
    doomed, pid, note = kill("engine", seed)
    assert_readable(doomed)
    assert doomed.child.wait() == 0, doomed.child.stderr
    warned = re.findall(r"^flexmarl: warning: at [\d.]+ s, (\w+): (\S+): ", doomed.child.stderr, re.MULTILINE)
    assert sorted(name for name, _ in warned) == ["instance_lost", "worker_lost"]
    assert len(doomed.child.stderr.splitlines()) == len(warned), "and nothing else is said"
    assert "raylet" not in doomed.child.stdout, "Ray speaks between our lines"
    lost, replaced = doomed.run.events(WorkerLost), doomed.run.events(InstanceReplaced)
    assert [one.pid for one in lost] == [pid]
    assert len(replaced) == 1
    figures = doomed.run.summary
    assert (figures["processes_lost"], figures["processes_replaced"]) == (1, 1)
    assert_ended_well(doomed, undisturbed)
    print(f"{note}; replaced within {replaced[0].seconds:.1f} s, ended as if undisturbed")


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_of_a_trainer_is_an_error_that_names_it_and_resume_goes_on(seed, kill: Kill, undisturbed: Left):
    doomed, pid, note = kill("trainer", seed)
    child = doomed.child
    if child.wait() == 0:  # its last work was done
        assert_ended_well(doomed, undisturbed)
        print(f"{note}; ended as if undisturbed")
        return
    assert child.process.returncode == 1
    said = child.stderr.splitlines()
    assert all(line.startswith("flexmarl: ") for line in said), child.stderr
    assert f"(pid {pid} " in child.stderr
    assert "trainer" in child.stderr
    assert "raylet" not in child.stdout, "Ray speaks between our lines"
    failure = next(line for line in said if not line.startswith("flexmarl: warning: "))
    assert "continue with: flexmarl train" in failure or "start again with: flexmarl train" in failure
    assert [one.pid for one in doomed.run.events(WorkerLost)] == [pid]
    seconds = child.wait_until_gone()
    assert_store_whole(doomed.run)
    outcome = assert_resumes(doomed, undisturbed)
    print(f"{note}; {said[-1]}; nothing left after {seconds:.1f} s; {outcome}")


def test_sigterm_ends_a_run_in_order_and_leaves_nothing(small_run: Path, tmp_path: Path, short_root: Path):
    doomed = Doomed(small_run, tmp_path / "run", short_root)
    try:
        assert doomed.wait(Moment("rollout", "group_admitted", 2, 0.0)), "witness: it was in a step"
        doomed.child.process.send_signal(signal.SIGTERM)
        assert doomed.child.wait() == 130
        (line,) = doomed.child.stderr.splitlines()
        assert line.startswith("flexmarl: stopped. ")
        assert "with: flexmarl train" in line
        assert len(doomed.run.events(RunFailed)) == 1
        doomed.child.wait_until_gone()
        assert_store_whole(doomed.run)
    finally:
        doomed.child.close()
