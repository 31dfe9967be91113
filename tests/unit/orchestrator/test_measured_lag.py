"""The lag that a run measures follows the rule of docs/benchmarks.md, within its bounds, and a resumed run keeps it."""

import asyncio
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.group_events import GroupAdmitted, GroupTaken, LagChanged
from flexmarl.orchestrator.checkpoint import CheckpointFolder, read_state
from flexmarl.orchestrator.measured_lag import CALM, FEWEST, MeasuredLag
from flexmarl.orchestrator.settings import Mode, PipelineSettings, law_of
from flexmarl.records import GroupId, GroupState
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.testing.faults.story import ended_by
from flexmarl.testing.scripted_run import ScriptedRun

GROUPS = 2
LAWS = {lag: law_of(Mode.ASYNC, PipelineSettings(lag="auto"), groups=GROUPS, now=lag) for lag in range(1, 9)}


def lags(rule: MeasuredLag, steps: list[float]) -> list[int]:
    return [ruling.law.lag if (ruling := rule.step_ended(seconds)) else 0 for seconds in steps]


def test_the_rule_gives_the_lag_of_the_benchmark() -> None:
    rule = MeasuredLag(LAWS, lag=1)
    for seconds in [10.0] * 999 + [156.0]:
        rule.task_ended(seconds)
    assert lags(rule, [29.0] * FEWEST) == [0] * FEWEST, "one task in a thousand does not count"
    rule.task_ended(156.0)
    rule.task_ended(156.0)
    ruling = rule.step_ended(29.0)
    assert ruling is not None
    assert ruling.law.lag == 5
    assert ruling.because == "all but one task in a thousand last at most 156 s, a step 29 s: lag 5"


def test_a_task_that_plays_still_counts_for_as_long_as_it_has_played() -> None:
    rule = MeasuredLag(LAWS, lag=1)
    rule.task_ended(1.0)
    assert lags(rule, [10.0, 10.0]) == [0, 0]
    ruling = rule.step_ended(10.0, oldest=35.0)
    assert ruling is not None
    assert ruling.law.lag == 3


def test_a_lag_goes_up_at_once_and_down_by_one_after_a_calm_time() -> None:
    rule = MeasuredLag(LAWS, lag=1)
    rule.task_ended(100.0)
    assert lags(rule, [30.0] * FEWEST) == [0, 0, 3]
    down = lags(rule, [1000.0] * (2 * CALM + FEWEST + 1))
    assert [lag for lag in down if lag] == [2, 1]
    first, second = (number for number, lag in enumerate(down) if lag)
    assert second - first == CALM


@given(
    tasks=st.lists(st.floats(0, 1e6), max_size=30),
    steps=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=40),
    most=st.integers(1, 8),
)
def test_whatever_is_measured_the_lag_stays_within_its_bounds(
    tasks: list[float], steps: list[tuple[float, float]], most: int
) -> None:
    rule, lag = MeasuredLag({lag: LAWS[lag] for lag in range(1, most + 1)}, lag=1), 1
    for number, (seconds, oldest) in enumerate(steps):
        for task in tasks[number : number + 1]:
            rule.task_ended(task)
        ruling = rule.step_ended(seconds, oldest=oldest)
        if ruling:
            assert 1 <= ruling.law.lag <= most
            assert ruling.law.lag > lag or ruling.law.lag == lag - 1
            lag = ruling.law.lag
        assert rule.lag == lag


@given(moves=st.lists(st.sampled_from(["admit", "end", 1, 2, 5, 8]), max_size=60))
def test_a_group_keeps_the_bound_of_the_loosest_law_of_its_life(moves: list[Any]) -> None:
    admission = Admission(LAWS[1])
    lives: dict[GroupId, list[AdmissionLaw]] = {}
    for move in moves:
        if move == "admit":
            if admission.may_admit().allowed:
                lives[admission.admit()] = [admission.law]
        elif move == "end":
            for group in list(lives)[:1]:
                admission.move(group, GroupState.EXPIRED)
                del lives[group]
        else:
            admission.change(LAWS[move])
            for laws in lives.values():
                laws.append(LAWS[move])
        bounds = [law.max_staleness or 0 for laws in (*lives.values(), [admission.law]) for law in laws]
        assert admission.max_staleness == max(bounds)
        assert len(lives) <= max([law.slots for laws in lives.values() for law in laws], default=math.inf)


async def long_tailed(task: Any, team: Any) -> None:
    """Every sixth task thinks for a minute, the others for a second."""
    number = int(task.prompt.split()[1])
    await asyncio.sleep(60.0 if number % 6 == 5 else 1.0)
    (await team.solver.act(task.prompt)).reward(float(number))


def run_of(folder: Path | None = None, *, steps: int = 12, lag: Any = "auto") -> ScriptedRun:
    return ScriptedRun(
        long_tailed,
        mode="async",
        seconds_per_sample=1.0,
        folder=folder,
        steps=steps,
        batch={"groups": GROUPS, "episodes": 2},
        pipeline={"lag": lag, "max_lag": 4},
        checkpoint={"every": 1 if folder else 0},
    )


def most_active(run: ScriptedRun, until: float) -> int:
    active, most = set[int](), 0
    for event in run.events.all:
        if event.t <= until and isinstance(event, GroupAdmitted):
            active.add(event.group)
        active.difference_update(ended_by(event))
        most = max(most, len(active))
    return most


def test_a_run_raises_its_lag_to_that_of_its_tasks_and_is_faster_for_it() -> None:
    run = run_of().play()
    changes = run.events.of(LagChanged)
    assert [change.before for change in changes] == [1, *(change.lag for change in changes[:-1])]
    assert changes[-1].lag == 4
    assert changes[-1].because.endswith("pipeline.max_lag is 4")
    assert most_active(run, math.inf) == (4 + 1) * GROUPS
    assert run.outcome is not None
    assert run.events.all[-1].t < run_of(lag=1).play().events.all[-1].t


def test_a_resumed_run_keeps_its_lag(tmp_path: Path) -> None:
    first = run_of(tmp_path, steps=8).play()
    lag = first.events.of(LagChanged)[-1].lag
    assert read_state(CheckpointFolder(tmp_path).chosen("newest")).admission.lag == lag > 1
    again = run_of(tmp_path, steps=10).play()
    taken = again.events.of(GroupTaken)[0].t
    assert most_active(again, taken) > (1 + 1) * GROUPS, "more than the lag that a run begins with allows"
    assert not again.events.of(LagChanged), "it is not measured anew before three steps have ended"
