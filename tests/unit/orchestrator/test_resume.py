"""Where a resumed run goes on."""

import shutil
from types import SimpleNamespace

import pytest

from flexmarl.errors import CheckpointError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import CheckpointPassedOver, CheckpointRemoved, StepStarted, StoreRewound
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome, PartialRow
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.saving import Checkpoints, resume
from flexmarl.records import AgentName, PolicyName, RowState, SampleId, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.scripted_run import ScriptedRun
from flexmarl.testing.training import FakeTrainer
from tests.unit.orchestrator.groups import at_group

SOLVER = PolicyName("solver")


def left_behind(folder, *steps, groups=6):
    """Checkpoints of these steps, two groups each, and a store in which all groups have ended."""
    checkpoints = Checkpoints(folder, keep=9, in_thread=False)
    for step in steps:
        trainer = FakeTrainer(SOLVER, InlineObjectStore())
        trainer.version, trainer.weight = Version(step), float(step)
        state = RunState(
            step=step,
            admission=at_group(2 * step),
            versions={SOLVER: Version(step)},
            wall_s=1.5,
        )
        run_virtual(checkpoints.save(state, {SOLVER: trainer}))
    store = SqliteStore(agents=[AgentName("solver")], columns=TURN_COLUMNS)
    for group in range(groups):
        sample_id = SampleId(f"task-{group}_0_g{group}e0a0")
        run_virtual(store.put(AgentName("solver"), [PartialRow(sample_id=sample_id, policy=SOLVER)]))
        run_virtual(store.settle([sample_id], Outcome(state=RowState.FAILED, reason="scripted")))
    return checkpoints, store


def go_on(checkpoints, store):
    trainer, events = FakeTrainer(SOLVER, InlineObjectStore()), RememberedEvents()
    said: list[str] = []
    state = run_virtual(resume(checkpoints, {SOLVER: trainer}, store, events=events, say=said.append))
    (rewound,) = events.of(StoreRewound)
    return SimpleNamespace(state=state, trainer=trainer, events=events, said=said, rewound=rewound)


def test_trainers_and_store_go_back_to_the_newest_checkpoint(tmp_path):
    resumed = go_on(*left_behind(tmp_path, 1, 2))
    assert (resumed.state.step, resumed.state.admission.next_group, resumed.state.wall_s) == (2, 4, 1.5)
    assert (resumed.trainer.version, resumed.trainer.weight) == (2, 2.0)
    assert (resumed.rewound.next_group, resumed.rewound.rows) == (4, 2)
    assert resumed.said == ["going on after step 2; groups from 4 on are played again, 2 rows of them are discarded"]


def test_a_damaged_checkpoint_is_passed_over_loudly_and_more_is_played_again(tmp_path):
    checkpoints, store = left_behind(tmp_path, 1, 2)
    (tmp_path / "step-00002" / "state.json").write_text("{}")
    resumed = go_on(checkpoints, store)
    assert resumed.state.step == 1
    assert resumed.rewound.rows == 4
    (passed_over,) = resumed.events.of(CheckpointPassedOver)
    assert "step-00002/state.json is torn" in passed_over.because
    assert resumed.said[0] == f"passed over a checkpoint: {passed_over.because}"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    resumed = go_on(*left_behind(tmp_path / "checkpoints"))
    assert resumed.state == RunState(step=0, admission=at_group(0), versions={SOLVER: Version(0)})
    assert resumed.rewound.rows == 6
    assert resumed.said[0] == "the run has no checkpoint: it begins again at step 0, in the same folder"


def test_when_every_checkpoint_is_damaged_the_error_says_what_to_do_and_the_store_is_left_alone(tmp_path):
    checkpoints, store = left_behind(tmp_path, 1)
    (tmp_path / "step-00001" / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint .* Put back a copy of one, or remove that folder"):
        go_on(checkpoints, store)
    assert len(run_virtual(store.query("SELECT sample_id FROM samples")).rows) == 6
    shutil.rmtree(tmp_path)
    assert go_on(checkpoints, store).state.step == 0


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    checkpoints, store = left_behind(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00001", tmp_path / ".partial-00002")
    resumed = go_on(checkpoints, store)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00001"]
    assert [event.path for event in resumed.events.of(CheckpointRemoved)] == [str(tmp_path / ".partial-00002")]


def part(folder, steps, store=None):
    return ScriptedRun(steps=steps, folder=folder, store=store, checkpoint={"every": 2}, evaluate={"tasks": 2}).play()


def test_a_finished_run_that_is_resumed_trains_nothing_and_evaluates_its_end_again(tmp_path):
    finished = part(tmp_path, 3)
    again = part(tmp_path, 3, finished.store)
    assert again.events.of(StepStarted) == []
    assert again.events.of(StoreRewound)[0].rows == 0
    assert again.outcome is not None
    assert finished.outcome is not None
    assert (again.outcome.before, again.outcome.after) == (finished.outcome.before, finished.outcome.after)
    assert again.outcome.before != again.outcome.after


def test_fewer_steps_than_are_done_leave_the_run_as_it_is_and_more_go_on(tmp_path):
    finished = part(tmp_path, 3)
    fewer = part(tmp_path, 1, finished.store)
    assert fewer.outcome is not None
    assert fewer.outcome.steps == 3
    assert fewer.events.of(StepStarted) == []
    more = part(tmp_path, 5, finished.store)
    assert [event.step for event in more.events.of(StepStarted)] == [3, 4]
    whole = part(tmp_path / "whole", 5)
    assert more.trainers[SOLVER].weight == whole.trainers[SOLVER].weight


def test_the_time_of_all_lives_of_a_run_adds_up(tmp_path):
    first = part(tmp_path, 2)
    second = part(tmp_path, 4)
    whole = part(tmp_path / "whole", 4)
    assert first.outcome is not None
    assert second.outcome is not None
    assert whole.outcome is not None
    assert first.outcome.wall_s > 0
    assert second.outcome.wall_s == pytest.approx(whole.outcome.wall_s)
