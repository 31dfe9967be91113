"""Whole runs in the asynchronous modes, in virtual time: who waits for whom, and what ends what would never end."""

import asyncio

import pytest

from flexmarl.errors import EpisodeError
from flexmarl.events.group_events import (
    GroupAdmitted,
    GroupExpired,
    GroupFailed,
    GroupFiltered,
    GroupStopped,
    GroupTaken,
)
from flexmarl.events.run_events import Evaluated, StepEnded
from flexmarl.events.training_events import Updated
from flexmarl.records import PolicyName, RowState
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER = PolicyName("solver")


def at(run, event):
    return [entry.t for entry in run.events.of(event)]


def numbers(run, event):
    return [entry.group for entry in run.events.of(event)]


def lasting(seconds):
    """A workflow whose task number i thinks for `seconds(i)`; the answer takes 0.2 s more."""

    async def workflow(task, team):
        await asyncio.sleep(seconds(number_of(task)))
        (await team.solver.act(task.prompt)).reward(float(number_of(task)))

    return workflow


def number_of(task):
    return int(task.prompt.split()[1])


def run_of(mode, seconds=lambda number: 0.8, *, workflow=None, **sections):
    """Two groups a step, of two episodes each; a sample trains for half a second."""
    pipeline = {"window": 0.5, **sections.pop("pipeline", {})}
    return ScriptedRun(
        workflow or lasting(seconds), mode=mode, seconds_per_sample=0.5, pipeline=pipeline, **{"steps": 3, **sections}
    )


def test_one_step_off_plays_a_step_while_the_one_before_trains():
    run = run_of("one_step_off").play()
    assert at(run, Updated) == [3.0, 5.0, 7.0]  # after 1 s of rollout, training never waits: 2 s each
    assert at(run_of("sync").play(), Updated) == [3.0, 6.0, 9.0]
    assert [entry.trained for entry in run.events.of(StepEnded)] == [(0, 1), (2, 3), (4, 5)]


def test_one_step_off_trains_what_has_finished_of_a_step_before_the_rest_has() -> None:
    training = {"solver": {"training": {"micro_batch": 2}}}
    run = run_of("one_step_off", lambda number: 5.0 if number == 0 else 0.8, policies=training).play()
    assert numbers(run, GroupTaken) == [1, 0, 2, 3, 4, 5]
    assert at(run, Updated)[0] == 6.2  # 1 s of training after the straggler, not 2: group 1 was trained before
    assert run.metrics[3]["staleness/solver/max"] == 1.0


def test_a_straggler_holds_up_its_window_only_and_greedy_passes_it():
    straggler = lambda number: 30.0 if number == 0 else 0.8  # noqa: E731
    taken = {mode: numbers(run_of(mode, straggler).play(), GroupTaken) for mode in ("async", "fifo", "greedy")}
    assert taken == {"fifo": [0, 1, 2, 3, 4, 5], "async": [1, 0, 2, 3, 4, 5], "greedy": [1, 2, 3, 4, 5, 6]}


def test_a_head_past_its_deadline_expires_and_the_others_go_on():
    run = run_of("fifo", lambda number: 500.0 if number == 1 else 0.8, pipeline={"head_deadline_s": 10.0}).play()
    (expired,) = [entry for entry in run.events.of(GroupExpired) if entry.because != "the run's last step was done"]
    assert (expired.group, expired.t, expired.again) == (1, pytest.approx(10.0, abs=0.01), False)
    assert "longer than pipeline.head_deadline_s=10" in expired.because
    assert numbers(run, GroupTaken) == [0, 2, 3, 4, 5, 6]


def test_the_finished_episodes_of_an_expired_group_expire_with_it():
    plays: list[int] = []

    async def one_of_two_hangs(task, team):
        (await team.solver.act(task.prompt)).reward(1.0)
        plays.append(number_of(task))
        if plays.count(0) == 2 and number_of(task) == 0:
            await asyncio.sleep(900.0)

    run = run_of("fifo", workflow=one_of_two_hangs, pipeline={"head_deadline_s": 10.0}).play()
    rows = [row for row in run.rows() if row.sample_id.startswith("task-0_")]
    assert [row.state for row in rows] == [RowState.EXPIRED] * 2
    assert all("head_deadline_s=10" in row.reason for row in rows)


def test_a_late_group_that_is_requeued_comes_back_at_the_tail_under_a_new_id():
    run = run_of(
        "fifo",
        lambda number: 500.0 if number == 1 else 0.8,
        pipeline={"head_deadline_s": 10.0, "late": "requeue"},
        steps=4,
    ).play()
    tasks = {entry.group: entry.task for entry in run.events.of(GroupAdmitted)}
    assert tasks[1] == "task-1"
    again = next(group for group, task in tasks.items() if task == "task-1" and group > 1)
    assert list(tasks.values())[:again] == [f"task-{i}" for i in range(again)]
    assert tasks[again + 1] == f"task-{again}"  # and no new task is passed over


def test_a_task_that_hangs_time_after_time_is_admitted_again_as_often_as_retries_allow_and_no_more():
    run = run_of(
        "fifo",
        lambda number: 900.0 if number == 0 else 0.8,
        pipeline={"head_deadline_s": 50.0, "late": "requeue"},
        rollout={"group_retries": 2},
        steps=20,
    ).play()
    expired = [entry for entry in run.events.of(GroupExpired) if "head_deadline_s=50" in entry.because]
    assert [entry.again for entry in expired] == [True, True, False]
    stopped = run.events.of(GroupStopped)  # When it left the window, whenever its episodes let go.
    assert [entry.group for entry in stopped] == [entry.group for entry in expired]
    assert all(stop.t <= end.t for stop, end in zip(stopped, expired, strict=True))
    assert expired[-1].because.endswith("all 3 groups of its task took too long")
    assert sum(entry.task == "task-0" for entry in run.events.of(GroupAdmitted)) == 3
    assert run.outcome is not None
    assert run.outcome.wall_s < 4 * 50.0


def test_groups_that_are_filtered_are_made_up_for_by_others():
    odd_teach = lambda prompt, request: "ab"[request.seed % 2] if int(prompt.split()[-1][:2].strip("<")) % 2 else "a"  # noqa: E731
    run = ScriptedRun(say=odd_teach, mode="async", steps=2, batch={"groups": 2, "episodes": 4}, credit={})
    run.play()
    assert all(len(entry.trained) == 2 for entry in run.events.of(StepEnded))
    assert run.events.of(GroupFiltered)
    assert run.trainers[SOLVER].version == 2


@pytest.mark.parametrize("updates", ["together", "per_policy"])
def test_a_run_in_which_every_group_is_filtered_ends_with_the_reason(updates):
    run = ScriptedRun(say=lambda *_: "a", mode="async", steps=3, credit={}, pipeline={"updates": updates})
    with pytest.raises(
        EpisodeError, match=r"step 1: the last 64 groups .* because: credit.filter found it too_easy; so"
    ):
        run.play()


def test_a_run_in_which_no_row_has_weight_ends_with_the_reason():
    single = {"filter": None, "estimator": {"type": "default", "singleton": "drop"}}

    plays: list[int] = []

    async def second_fails(task, team):
        (await team.solver.act(task.prompt)).reward(1.0)
        plays.append(number_of(task))
        if plays.count(number_of(task)) == 2:
            raise ValueError("broke")

    run = ScriptedRun(second_fails, mode="async", steps=3, credit=single)
    with pytest.raises(EpisodeError, match="no row has weight"):
        run.play()


def test_a_poison_task_costs_its_group_and_a_broken_workflow_ends_the_run():
    async def poisoned(task, team):
        if number_of(task) == 2:
            raise ValueError("poison")
        (await team.solver.act(task.prompt)).reward(1.0)

    run = run_of("async", workflow=poisoned).play()
    assert numbers(run, GroupFailed) == [2]
    assert run.outcome is not None

    async def broken(task, team):
        raise ValueError("the sandbox is down")

    with pytest.raises(EpisodeError, match=r"the last 64 groups gave no sample .*the sandbox is down"):
        run_of("async", workflow=broken).play()


@pytest.mark.parametrize("updates", ["together", "per_policy"])
def test_when_the_tasks_are_over_the_steps_that_can_be_filled_are_done_and_then_it_is_an_error(updates):
    run = run_of("async", num_tasks=5, pipeline={"updates": updates})
    with pytest.raises(SourceExhausted, match=r"step 3 cannot be filled: .*no training task at position 5 of 5"):
        run.play()
    assert len(run.events.of(StepEnded)) == 2
    enough = run_of("async", num_tasks=6, pipeline={"updates": updates}).play()
    assert enough.outcome is not None
    assert enough.outcome.steps == 3


def test_a_task_that_is_late_comes_again_even_when_there_are_no_new_ones():
    plays: list[int] = []

    async def slow_at_first(task, team):
        plays.append(number_of(task))
        await asyncio.sleep(500.0 if plays.count(5) == 1 and number_of(task) == 5 else 0.8)
        (await team.solver.act(task.prompt)).reward(1.0)

    run = ScriptedRun(
        slow_at_first,
        mode="async",
        num_tasks=6,
        steps=3,
        batch={"groups": 2, "episodes": 1},
        credit={"filter": None, "estimator": {"type": "default", "singleton": "raw"}},
        pipeline={"head_deadline_s": 10.0, "late": "requeue"},
    ).play()
    assert run.outcome is not None
    assert run.events.of(GroupAdmitted)[-1].task == "task-5"


def test_what_still_plays_when_the_last_step_is_done_ends_as_expired():
    run = run_of("greedy", lambda number: 500.0 if number == 3 else 0.8).play()
    assert 3 in numbers(run, GroupExpired)
    assert run.events.of(StepEnded)[-1].t < 10.0
    assert run.events.all[-1].t < 10.0


def test_evaluations_in_between_are_pinned_while_rollout_goes_on():
    run = run_of("async", evaluate={"tasks": 2, "every": 1}).play()
    assert [entry.when for entry in run.events.of(Evaluated)] == ["before", "between", "between", "after"]
    assert [entry.evaluation["versions"][SOLVER] for entry in run.events.of(Evaluated)] == [0, 1, 2, 3]


def test_every_step_says_how_stale_its_tokens_were_and_what_lengths_it_left_out():
    run = run_of("one_step_off", steps=4).play()
    assert [run.metrics[step]["staleness/solver/mean"] for step in (1, 2, 3, 4)] == [0.0, 1.0, 1.0, 1.0]
    assert run.metrics[4]["staleness/solver/max"] == 1.0
    assert run.metrics[4]["length_bias/ratio"] == 1.0
    assert run.metrics[4]["length_bias/ks"] == 0.0
    assert run.metrics[4]["publish_lag_s/solver"] == 0.0


def test_groups_that_fail_at_once_do_not_use_up_the_tasks_while_a_step_trains():
    async def broken_from_half_a_second_on(task, team):
        if number_of(task) > 1:
            await asyncio.sleep(max(0.0, 0.5 - asyncio.get_running_loop().time()))
            raise RuntimeError("the sandbox is down")
        (await team.solver.act(task.prompt)).reward(float(number_of(task)))

    run = run_of("async", workflow=broken_from_half_a_second_on, rollout={"group_retries": 0}, num_tasks=500)
    with pytest.raises(EpisodeError, match="the sandbox is down"):
        run.play()
    assert numbers(run, GroupTaken) == [0, 1], "witness: a step was training"
    assert len(run.events.of(GroupAdmitted)) < 100
