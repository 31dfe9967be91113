"""A save that fails is a warning as long as there is something to go on from."""

import asyncio
import errno
import os
from types import SimpleNamespace

import pytest

from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import CheckpointDropped, CheckpointFailed, CheckpointSaved, StorePruned
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.checkpoint import RunState, verify
from flexmarl.orchestrator.saving import Checkpoints, Saver
from flexmarl.orchestrator.settings import CheckpointSettings
from flexmarl.records import PolicyName, RowState, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.experience import AGENTS, COLUMNS, SHARED, partial, sample
from flexmarl.testing.experience import SOLVER as SOLVER_AGENT
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


class Weighs(FakeTrainer):
    """Has one weight, which it saves and loads."""

    weight = 0.0

    async def save(self, path):
        await super().save(path)
        (path / "weight").write_text(str(self.weight))

    async def load(self, path):
        self.weight = float((path / "weight").read_text())
        return await super().load(path)


class SlowDisk(Checkpoints):
    """A disk on which a checkpoint is complete when the test says so."""

    def __init__(self, folder):
        super().__init__(folder, keep=2)
        self.may_finish, self.finishing, self.most_at_once = asyncio.Event(), 0, 0
        self.error: CheckpointError | None = None

    async def finish(self, state):
        self.finishing += 1
        self.most_at_once = max(self.most_at_once, self.finishing)
        await self.may_finish.wait()
        self.finishing -= 1
        if self.error:
            raise self.error
        return await super().finish(state)


def slow_stage(folder):
    disk, events, said = SlowDisk(folder), RememberedEvents(), list[str]()
    trainer = Weighs(SOLVER, InlineObjectStore())
    settings = CheckpointSettings(every=1)
    saver = Saver(disk, {SOLVER: trainer}, settings, events=events, warn=said.append, prune=None)
    return SimpleNamespace(disk=disk, saver=saver, trainer=trainer, events=events, said=said)


def at_step(step):
    return RunState(step=step, admission=at_group(10 * step), versions={SOLVER: Version(0)})


def test_the_step_goes_on_while_a_checkpoint_of_the_weights_as_they_were_is_completed(tmp_path):
    async def scenario():
        at = slow_stage(tmp_path)
        async with at.saver.beside():
            at.trainer.weight = 1.0
            await at.saver.save(at_step(1), last=False)
            assert names(tmp_path) == [".partial-00001"], "a killed run finds no checkpoint here"
            at.trainer.weight = 2.0
            at.disk.may_finish.set()
        assert names(tmp_path) == ["step-00001"]
        await at.disk.restore(at.disk.chosen("newest"), {SOLVER: at.trainer})
        assert at.trainer.weight == 1.0

    asyncio.run(scenario())


def test_at_most_one_checkpoint_is_under_way_and_the_last_one_is_waited_for(tmp_path):
    async def scenario():
        at = slow_stage(tmp_path)
        async with at.saver.beside():
            await at.saver.save(at_step(1), last=False)
            async with asyncio.TaskGroup() as tasks:
                second = tasks.create_task(at.saver.save(at_step(2), last=False))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not second.done()
                at.disk.may_finish.set()
            await at.saver.save(at_step(3), last=True)
            assert names(tmp_path) == ["step-00002", "step-00003"]
        assert at.disk.most_at_once == 1
        assert [event.step for event in at.events.of(CheckpointSaved)] == [1, 2, 3]

    asyncio.run(scenario())


def test_a_failure_beside_the_run_is_a_warning_if_there_is_an_older_checkpoint_and_else_ends_it(tmp_path):
    async def scenario(older):
        at = slow_stage(tmp_path / str(older))
        at.disk.may_finish.set()
        async with at.saver.beside():
            if older:
                await at.saver.save(at_step(1), last=True)
            at.disk.error = CheckpointError("the disk is full")
            await at.saver.save(at_step(2), last=False)
            await at.saver.not_saved(at_group(30))
            for _ in range(20):
                await asyncio.sleep(0)
            await at.saver.not_saved(at_group(40))
            assert older, "the error ends the run with the next step"
        assert [event.step for event in at.events.of(CheckpointFailed)] == [2]
        assert at.said == ["no checkpoint of step 2: the disk is full. Going on; the newest is of step 1"]

    asyncio.run(scenario(True))
    with pytest.raises(CheckpointError, match="the disk is full"):
        asyncio.run(scenario(False))


def test_an_error_of_the_run_waits_for_the_checkpoint_under_way(tmp_path):
    async def scenario():
        at = slow_stage(tmp_path)
        async with at.saver.beside():
            await at.saver.save(at_step(1), last=False)
            asyncio.get_running_loop().call_later(0.01, at.disk.may_finish.set)
            raise TrainingError("its process is gone")

    with pytest.raises(TrainingError):
        asyncio.run(scenario())
    assert names(tmp_path) == ["step-00001"]


def test_a_checkpoint_holds_the_store_as_it_was_and_a_store_that_cannot_be_copied_is_no_checkpoint(tmp_path):
    async def life() -> list[dict[RowState, int]]:
        path = tmp_path / "experience.sqlite"
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        disk, trainer = Checkpoints(tmp_path / "saved", keep=9, store=path), FakeTrainer(SOLVER, InlineObjectStore())
        counts: list[dict[RowState, int]] = []
        for step in (1, 2):
            await store.put(SOLVER_AGENT, [partial(sample(step), text=f"of step {step}")])
            await disk.save(
                RunState(step=step, admission=at_group(step), versions={SOLVER: Version(0)}), {SOLVER: trainer}
            )
        await store.close()
        for held in disk.held():
            verify(disk.of_step(held.step))
            copy = DurableStore.join(disk.of_step(held.step) / path.name)
            counts.append(dict(await copy.counts(SHARED)))
            await copy.close()
        path.write_bytes(b"no store")
        with pytest.raises(CheckpointError, match=r"step-00003.*file is not a database"):
            await disk.save(RunState(step=3, admission=at_group(3), versions={SOLVER: Version(0)}), {SOLVER: trainer})
        assert names(disk.path) == ["step-00001", "step-00002"]
        return counts

    assert asyncio.run(life()) == [{RowState.OPEN: 1}, {RowState.OPEN: 2}]
