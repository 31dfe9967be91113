"""Journals of runs that never were, but could have been."""

import random
from collections.abc import Iterator
from pathlib import Path

from flexmarl.events.event import Event, Events
from flexmarl.events.group_events import GroupReady, RolloutEnded
from flexmarl.events.journal import Journal
from flexmarl.events.run_events import ProcessStarted, RunStarted, StepEnded, WorkerLost
from flexmarl.events.serving_events import Called, InstanceLost, QueueCounts
from flexmarl.events.training_events import MicroBatchDone, Updated
from flexmarl.records import CONTROLLER, FinishReason, InstanceId, WorkerId

STEP_S = 4.0
STARTED = RunStarted(because="one policy per agent", level="L3", seed=1, mode="microbatch", release="at_once", chat={})


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def events_on(path: Path, clock) -> Events:
    """Events that are journalled."""
    events = Events(clock)
    events.listen(Event, Journal(path).write)
    return events


def write_command(path: Path, *, steps: int, first_pid: int, lost: bool = False, start_s: float = 0.0) -> float:
    """One command of a run: a solver and a verifier with an engine and a trainer each; returns what it took.

    Its workers are ready after `start_s`. Rollout takes the first three quarters of each step; training begins halfway
    through and ends with the step.
    """
    hand = Hand()
    events = events_on(path, hand)
    hand.time = start_s
    events.emit(STARTED)
    for number, process in enumerate(
        ("controller", "engine/solver/0", "engine/verifier/0", "trainer/solver", "trainer/verifier")
    ):
        events.emit(ProcessStarted(process=WorkerId.parse(process), pid=first_pid + number, node="10.0.0.1"))
    for step in range(steps):
        start = start_s + step * STEP_S
        for ended, event in sorted(_step(start, step), key=lambda entry: entry[0]):
            hand.time = ended
            events.emit(event)
    if lost:
        solver = InstanceId("solver", 0)
        engine = WorkerId.engine(solver)
        events.emit(InstanceLost(instance=solver, because="WorkerError: process 11 is gone"))
        events.emit(WorkerLost(process=engine, node="10.0.0.1", pid=first_pid + 1, because="killed by signal 9"))
        events.emit(ProcessStarted(process=engine, pid=first_pid + 100, node="10.0.0.1"))
    return hand.time


def _step(start: float, step: int) -> Iterator[tuple[float, Event]]:
    dice = random.Random(step)
    for policy in ("solver", "verifier"):
        trainer = WorkerId.trainer(policy)
        for call in range(24):
            began = start + dice.random() * 1.5
            ended = began + min(0.05 + dice.expovariate(2), 1.4)
            yield ended, Called(
                process=WorkerId("engine", policy, 0), began=began, policy=policy, request=f"g{step}e{call}a0/0",
                prompt_tokens=40, sampled_tokens=12, reused_tokens=30, version=step, finish=FinishReason.STOP,
            )  # fmt: skip
        for number in range(4):
            began = start + 2.0 + number * 0.4
            yield began - 0.1, GroupReady(because="all its episodes ended", group=step, samples={policy: 8})
            yield began + 0.41, MicroBatchDone(
                process=trainer, began=began, ended=began + 0.4, policy=policy, rows=8, tokens=96.0,
                micro_batch=f"{policy}/{step}/{number}", duration_s=0.39,
            )  # fmt: skip
        yield start + 3.9, Updated(process=trainer, began=start + 3.62, policy=policy, version=step + 1, report={})
    yield start + 3.0, RolloutEnded(process=CONTROLLER, began=start, step=step)
    yield start + 4.0, StepEnded(process=CONTROLLER, began=start, step=step, trained=(), versions={})
    for look in range(16):
        busy = max(0, 24 - look * 2)
        yield (
            start + look / 4,
            QueueCounts(
                queued={"solver": busy // 2, "verifier": 0}, running={"solver": busy, "verifier": busy // 3}, lag_ms=1.5
            ),
        )
