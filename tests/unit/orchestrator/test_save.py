"""A save that fails is a warning as long as there is something to go on from."""

import errno
import os
from types import SimpleNamespace

import pytest

from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import CheckpointDropped, CheckpointFailed, CheckpointSaved, StorePruned
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.saving import Checkpoints, Saver
from flexmarl.orchestrator.settings import CheckpointSettings
from flexmarl.records import PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer
from tests.unit.orchestrator.groups import at_group

SOLVER = PolicyName("solver")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Breaks(FakeTrainer):
    """Cannot save while there is an `error`."""

    error: Exception | None = None

    async def save(self, path):
        if self.error:
            raise self.error
        await super().save(path)


def stage(folder, **chosen):
    settings = CheckpointSettings.model_validate({"every": 1, **chosen})
    checkpoints = Checkpoints(folder, keep=settings.keep, budget_bytes=settings.budget_bytes, in_thread=False)
    trainer, events = Breaks(SOLVER, InlineObjectStore()), RememberedEvents()
    said: list[str] = []
    pruned: list[int] = []

    async def prune(before_group):
        pruned.append(before_group)
        return 2 * before_group

    saver = Saver(checkpoints, {SOLVER: trainer}, settings, events=events, warn=said.append, prune=prune)

    def save(step, *, last=False, error=None):
        trainer.error = error
        state = RunState(
            step=step,
            admission=at_group(10 * step),
            versions={SOLVER: Version(0)},
        )
        run_virtual(saver.save(state, last=last))

    return SimpleNamespace(save=save, saver=saver, events=events, said=said, pruned=pruned)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_due_every_so_many_steps_and_after_the_last_or_never(tmp_path):
    saver = stage(tmp_path, every=3).saver
    assert [step for step in range(1, 9) if saver.due(step, last=step == 8)] == [3, 6, 8]
    assert not stage(tmp_path, every=0).saver.due(8, last=True)


def test_the_run_goes_on_with_a_warning_while_an_older_checkpoint_is_there(tmp_path):
    at = stage(tmp_path)
    at.save(1)
    at.save(2, error=FULL)
    (failed,) = at.events.of(CheckpointFailed)
    assert failed.step == 2
    assert "No space left on device" in failed.because
    (warning,) = at.said
    assert warning.startswith(f"no checkpoint of step 2: saving {tmp_path}/step-00002: OSError: ")
    assert warning.endswith("Going on; the newest is of step 1")
    at.save(3)
    assert names(tmp_path) == ["step-00001", "step-00003"]


def test_a_first_save_that_fails_is_an_error_for_there_is_nothing_to_go_on_from(tmp_path):
    at = stage(tmp_path)
    with pytest.raises(CheckpointError, match=r"saving .*step-00001: OSError: .* No space left on device"):
        at.save(1, error=FULL)
    assert len(at.events.of(CheckpointFailed)) == 1
    assert at.said == []


def test_a_last_save_that_fails_is_an_error_for_the_weights_would_be_lost_unnoticed(tmp_path):
    at = stage(tmp_path)
    at.save(1)
    with pytest.raises(CheckpointError, match="step-00002"):
        at.save(2, last=True, error=FULL)
    assert names(tmp_path) == ["step-00001"]


def test_an_older_checkpoint_that_is_damaged_is_nothing_to_go_on_from(tmp_path):
    at = stage(tmp_path)
    at.save(1)
    (tmp_path / "step-00001" / "state.json").unlink()
    with pytest.raises(CheckpointError):
        at.save(2, error=FULL)


def test_a_trainer_that_is_broken_is_never_a_warning(tmp_path):
    at = stage(tmp_path)
    at.save(1)
    with pytest.raises(TrainingError, match="its process is gone"):
        at.save(2, error=TrainingError("its process is gone"))


def test_the_journal_tells_what_was_saved_dropped_and_pruned_from_the_store(tmp_path):
    at = stage(tmp_path)
    for step in (1, 2, 3):
        at.save(step)
    assert [event.step for event in at.events.of(CheckpointSaved) if event.bytes > 0] == [1, 2, 3]
    assert [(event.step, event.because) for event in at.events.of(CheckpointDropped)] == [(1, "checkpoint.keep is 2")]
    assert at.pruned == [10, 10, 20], "the older of two checkpoints decides"
    assert [(event.before_group, event.rows) for event in at.events.of(StorePruned)] == [
        (10, 20),
        (10, 20),
        (20, 40),
    ]


def test_a_budget_below_one_checkpoint_is_told_and_keeps_the_newest(tmp_path):
    at = stage(tmp_path, budget_gb=1e-8)
    at.save(1)
    at.save(2)
    assert names(tmp_path) == ["step-00002"]
    assert at.said[0].endswith("more than checkpoint.budget_gb, 1e-08: only the newest stays")


def test_without_checkpoints_every_step_makes_room_in_the_store(tmp_path):
    at = stage(tmp_path, every=0)
    assert not at.saver.due(5, last=True)
    run_virtual(at.saver.not_saved(at_group(20)))
    assert at.pruned == [20]


def test_between_two_checkpoints_the_store_stays_as_it_is(tmp_path):
    at = stage(tmp_path, every=3)
    run_virtual(at.saver.not_saved(at_group(20)))
    assert at.pruned == []
