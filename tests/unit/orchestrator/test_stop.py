"""A run that is asked to stop ends at a step boundary with a checkpoint, in every mode, and resumes from there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.group_events import GroupAdmitted
from flexmarl.events.notices import EvaluationStarted
from flexmarl.events.run_events import CheckpointSaved, Evaluated, StepEnded, StepStarted
from flexmarl.records import RowState
from flexmarl.testing.scripted_run import ScriptedRun

MODES = {
    "microbatch": {"mode": "microbatch"},
    "sync": {"mode": "sync"},
    "ahead": {"mode": "microbatch", "pipeline": {"ahead": True}},
    "async": {"mode": "async"},
    "per_policy": {"mode": "async", "pipeline": {"updates": "per_policy"}},
}
STEPS = 5


def run_of(folder, mode, **sections):
    batch, every = {"groups": 2, "episodes": 2}, {"every": 100}
    return ScriptedRun(folder=folder, steps=STEPS, batch=batch, checkpoint=every, **MODES[mode], **sections)


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_run_saves_the_step_under_way_and_a_resumed_one_does_the_rest(tmp_path, mode):
    stopped = run_of(tmp_path, mode)
    stopped.events.listen(StepStarted, lambda begun: stopped.stop.make("Ctrl-C") if begun.step == 1 else None)
    stopped.play()
    ended = [event.step for event in stopped.events.of(StepEnded)]
    assert ended == [0, 1]
    assert stopped.outcome.stopped == "Ctrl-C"
    assert [event.step for event in stopped.events.of(CheckpointSaved)] == [2]
    resumed = run_of(tmp_path, mode)
    resumed.play()
    assert [event.step for event in resumed.events.of(StepEnded)] == [2, 3, 4]
    assert resumed.outcome.stopped == ""
    if mode != "per_policy":  # There, versions count batches.
        assert resumed.trainers["solver"].version == STEPS


@given(groups=st.integers(0, 2 * STEPS - 1), mode=st.sampled_from(sorted(MODES)))
def test_whenever_a_run_is_stopped_its_last_step_is_saved_and_no_group_is_lost(tmp_path_factory, groups, mode):
    run = run_of(tmp_path_factory.mktemp("stopped"), mode)
    admitted = []

    def heard(event):
        admitted.append(event)
        if len(admitted) == groups + 1:
            run.stop.make("Ctrl-C")

    run.events.listen(GroupAdmitted, heard)
    run.play()
    ended, saved = run.events.of(StepEnded), run.events.of(CheckpointSaved)
    assert [event.step for event in saved] == [ended[-1].step + 1]
    assert run.outcome.steps == ended[-1].step + 1 <= STEPS
    assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.EXPIRED, RowState.FAILED}


@pytest.mark.parametrize(("when", "steps"), [("before", 0), ("between", 2), ("after", STEPS)])
def test_an_evaluation_is_left_at_once_and_its_step_is_saved(tmp_path, when, steps):
    run = run_of(tmp_path, "sync", evaluate={"tasks": 2, "every": 2, "every_tasks": 1})
    run.events.listen(EvaluationStarted, lambda begun: run.stop.make("SIGTERM") if begun.when == when else None)
    run.play()
    assert run.outcome.stopped == "SIGTERM"
    assert run.outcome.steps == steps
    assert [event.step for event in run.events.of(CheckpointSaved)] == ([steps] if steps else [])
    assert when not in [event.when for event in run.events.of(Evaluated)]


def test_a_run_that_has_done_everything_is_not_stopped(tmp_path):
    run = run_of(tmp_path, "sync")
    run.events.listen(StepEnded, lambda ended: run.stop.make("Ctrl-C") if ended.step == STEPS - 1 else None)
    run.play()
    assert run.outcome.stopped == ""
    assert run.outcome.steps == STEPS
