"""Journals of runs that never were, but could have been."""

import random
from collections.abc import Iterator
from pathlib import Path

from flexmarl.events.journal import Journal

STEP_S = 4.0


class Hand:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def write_command(path: Path, *, steps: int, first_pid: int, lost: bool = False) -> float:
    """One command of a run: a solver and a verifier with an engine and a trainer each; returns what it took.

    Rollout takes the first three quarters of each step; training begins halfway through and ends with the step.
    """
    hand = Hand()
    journal = Journal(path, hand)
    journal.event("run_started", because="one policy per agent", seed=1)
    for number, process in enumerate(
        ("controller", "engine/solver/0", "engine/verifier/0", "trainer/solver", "trainer/verifier")
    ):
        journal.event("process_started", process=process, pid=first_pid + number, node="10.0.0.1")
    for step in range(steps):
        start = step * STEP_S
        for ended, event, fields in sorted(_step(start, step), key=lambda entry: entry[0]):
            hand.time = ended
            journal.event(event, **fields)
    if lost:
        journal.event("instance_lost", instance="solver/0", because="WorkerError: process 11 is gone")
        journal.event("worker_lost", process="engine/solver/0", because="killed by signal 9")
        journal.event("process_started", process="engine/solver/0", pid=first_pid + 100, node="10.0.0.1")
    journal.close()
    return hand.time


def _step(start: float, step: int) -> Iterator[tuple[float, str, dict]]:
    dice = random.Random(step)
    for policy in ("solver", "verifier"):
        for call in range(24):
            began = start + dice.random() * 1.5
            ended = began + min(0.05 + dice.expovariate(2), 1.4)
            yield ended, "call", {
                "process": f"engine/{policy}/0", "began": began, "policy": policy, "request": f"g{step}e{call}a0/0",
                "prompt_tokens": 40, "sampled_tokens": 12, "reused_tokens": 30, "version": step, "finish": "stop",
            }  # fmt: skip
        for number in range(4):
            began = start + 2.0 + number * 0.4
            yield (
                began - 0.1,
                "group_ready",
                {"because": "all its episodes ended", "group": step, "samples": {policy: 8}},
            )
            yield began + 0.41, "micro_batch", {
                "process": f"trainer/{policy}", "began": began, "ended": began + 0.4, "policy": policy, "rows": 8,
                "tokens": 96.0, "micro_batch": f"{policy}/{step}/{number}", "duration_s": 0.39,
            }  # fmt: skip
        yield start + 3.9, "updated", {"process": f"trainer/{policy}", "began": start + 3.62, "policy": policy}
    yield start + 3.0, "rollout_ended", {"process": "controller", "began": start, "step": step}
    yield start + 4.0, "step_ended", {"process": "controller", "began": start, "step": step}
    for look in range(16):
        busy = max(0, 24 - look * 2)
        yield start + look / 4, "queues", {
            "queued": {"solver": busy // 2, "verifier": 0}, "running": {"solver": busy, "verifier": busy // 3},
            "lag_ms": 1.5,
        }  # fmt: skip
