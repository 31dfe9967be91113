"""Checkpoints are whole or do not count."""

import asyncio
import errno
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from itertools import count

import pytest

from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.checkpoint import MANIFEST, RunState, read_state, seal
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.saving import Checkpoints, Drop
from flexmarl.orchestrator.stopping import figures_of
from flexmarl.records import AgentName, GroupId, PolicyName, Version
from flexmarl.rollout.admission import ActiveGroup, AdmissionState
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer
from tests.unit.orchestrator.groups import at_group

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")


def trainers(weight=0.0, version=0):
    made = {name: FakeTrainer(name, InlineObjectStore()) for name in (SOLVER, VERIFIER)}
    for trainer in made.values():
        trainer.weight, trainer.version = weight, Version(version)
    return made


def state(step=4):
    before = Evaluation(
        versions={SOLVER: Version(0)},
        episodes=8,
        failed=1,
        metrics={"success": 0.5},
        rewards={AgentName("solver"): 0.25},
        ranges={"success": (0.0, 1.0)},
        tokens=80,
    )
    versions = {SOLVER: Version(step), VERIFIER: Version(step)}
    return RunState(
        step=step,
        admission=at_group(10 * step),
        versions=versions,
        before=before,
        wall_s=12.5,
    )


def checkpoints_in(folder, *, keep=2, budget_bytes=None):
    return Checkpoints(folder, keep=keep, budget_bytes=budget_bytes, in_thread=False)


def save_step(checkpoints, step):
    return run_virtual(checkpoints.save(state(step), trainers(weight=float(step), version=step)))


def save(folder, *steps, keep=2):
    checkpoints = checkpoints_in(folder, keep=keep)
    for step in steps:
        save_step(checkpoints, step)
    return checkpoints


def load(checkpoints, trainers):
    return run_virtual(checkpoints.restore(checkpoints.chosen("newest"), trainers))


def newest(checkpoints):
    found = run_virtual(checkpoints.find())
    return found.path and found.path.name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    checkpoints = save(tmp_path, 4)
    restored = trainers()
    assert load(checkpoints, restored) == state(4)
    assert {(trainer.weight, trainer.version) for trainer in restored.values()} == {(4.0, 4)}
    assert names(tmp_path / "step-00004") == ["MANIFEST.json", "solver", "state.json", "verifier"]


def test_groups_that_were_active_and_tasks_that_were_late_come_back(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    active = ActiveGroup(group=GroupId(40), position=7, attempt=1)
    late = AdmissionState(next_group=41, next_position=38, again=(5,), active=(active,), expiries=((5, 1), (7, 2)))
    left = replace(state(4), admission=late)
    run_virtual(checkpoints.save(left, trainers(version=4)))
    assert load(checkpoints, trainers()) == left


def test_evaluations_come_back_and_those_of_an_older_checkpoint_are_figures_alone(tmp_path):
    found = state(4).before
    checkpoints = checkpoints_in(tmp_path)
    run_virtual(checkpoints.save(replace(state(4), evaluations={0: found, 4: found}), trainers(version=4)))
    assert load(checkpoints, trainers()).evaluations == {0: found, 4: found}
    written = tmp_path / "step-00004" / "state.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"evaluations": {"4": {"reward/solver": 0.25}}}))
    assert figures_of(read_state(tmp_path / "step-00004").evaluations[4]) == {"reward/solver": 0.25}


def test_a_state_without_an_evaluation_comes_back_too(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    bare = RunState(
        step=1,
        admission=at_group(2),
        versions={SOLVER: Version(0), VERIFIER: Version(0)},
    )
    run_virtual(checkpoints.save(bare, trainers()))
    assert load(checkpoints, trainers()) == bare


def test_what_estimators_remember_comes_back_to_the_last_bit(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    remembering = replace(state(4), memory={"solver": 0.1 + 0.2, "verifier": -1 / 3})
    run_virtual(checkpoints.save(remembering, trainers(version=4)))
    assert load(checkpoints, trainers()).memory == {"solver": 0.30000000000000004, "verifier": -1 / 3}


def test_a_checkpoint_from_before_estimators_remembered_is_one_in_which_they_remember_nothing(tmp_path):
    checkpoints = save(tmp_path, 4)
    written = tmp_path / "step-00004" / "state.json"
    older = json.loads(written.read_text())
    del older["memory"]
    written.write_text(json.dumps(older))
    (tmp_path / "step-00004" / MANIFEST).unlink()
    seal(tmp_path / "step-00004")
    assert load(checkpoints, trainers()) == state(4)


def test_trainers_get_whole_paths_whatever_their_working_directory_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    class Elsewhere(FakeTrainer):
        async def save(self, path):
            asked.append(path)
            await super().save(path)

    trainer = Elsewhere(SOLVER, InlineObjectStore())
    run_virtual(Checkpoints(tmp_path.relative_to(tmp_path), keep=1, in_thread=False).save(state(0), {SOLVER: trainer}))
    assert asked == [tmp_path / ".partial-00000" / "solver"]


def test_the_event_loop_goes_on_while_the_disk_is_busy(tmp_path):
    ticks = []

    class Marks(FakeTrainer):
        async def save(self, path):
            await super().save(path)
            ticks.clear()

    async def tick():
        for number in count():
            ticks.append(number)
            await asyncio.sleep(0)

    async def scenario():
        ticking = asyncio.create_task(tick())
        await Checkpoints(tmp_path, keep=1).save(state(0), {SOLVER: Marks(SOLVER, InlineObjectStore())})
        ticking.cancel()

    asyncio.run(scenario())
    assert ticks


def test_the_newest_stay_and_the_oldest_go(tmp_path):
    checkpoints = save(tmp_path, 1, 2, 3, 99_999, 100_000, keep=3)
    assert names(tmp_path) == ["step-00003", "step-100000", "step-99999"]
    assert newest(checkpoints) == "step-100000"


def test_a_save_tells_what_it_took_what_went_and_what_may_be_played_again(tmp_path):
    checkpoints = save(tmp_path, 4, 8)
    saved = save_step(checkpoints, 12)
    files = [file for file in saved.path.rglob("*") if file.is_file() and file.name != "MANIFEST.json"]
    assert saved.num_bytes == sum(file.stat().st_size for file in files)
    assert saved.dropped == [Drop(step=4, because="checkpoint.keep is 2")]
    assert saved.first_group == 80


def test_the_best_checkpoint_stays_and_keeps_no_rows_of_the_groups_after_it(tmp_path):
    checkpoints = save(tmp_path, 4)
    checkpoints.mark_best(4)
    assert [save_step(checkpoints, step).first_group for step in (8, 12, 16)] == [40, 80, 120]
    assert names(tmp_path) == ["best", "step-00004", "step-00012", "step-00016"]


def test_the_budget_drops_the_oldest_but_never_the_newest(tmp_path):
    size = save_step(checkpoints_in(tmp_path), 4).num_bytes
    roomy = checkpoints_in(tmp_path, keep=5, budget_bytes=2 * size + 20)
    save_step(roomy, 5)
    save_step(roomy, 6)
    assert names(tmp_path) == ["step-00005", "step-00006"]
    saved = save_step(checkpoints_in(tmp_path, keep=5, budget_bytes=1), 7)
    assert names(tmp_path) == ["step-00007"]
    assert [drop.step for drop in saved.dropped] == [6, 5]


def tear(folder):
    file = folder / "solver" / "trainer.json"
    file.write_text(file.read_text()[:-3])
    return "trainer.json is torn: 56 bytes were written, 53 bytes are there"


def flip_a_bit(folder):
    file = folder / "verifier" / "trainer.json"
    content = bytearray(file.read_bytes())
    content[12] ^= 1
    file.write_bytes(content)
    return "trainer.json is damaged: its bytes are not those that were written"


def lose_a_file(folder):
    (folder / "state.json").unlink()
    return "state.json is missing"


def lose_the_manifest(folder):
    (folder / "MANIFEST.json").unlink()
    return "is not complete: it has no MANIFEST.json"


def tear_the_manifest(folder):
    file = folder / "MANIFEST.json"
    file.write_text(file.read_text()[:-30])
    return "MANIFEST.json is damaged"


def empty_the_manifest(folder):
    (folder / "MANIFEST.json").write_text("{}")
    return "MANIFEST.json is damaged: ValueError: it names no file"


def name_what_no_file_is_called(folder):
    (folder / "MANIFEST.json").write_text(json.dumps({"x" * 400: {"bytes": 1, "blake2b": ""}}))
    return "MANIFEST.json is damaged"


def lose_everything(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return "is not complete: it has no MANIFEST.json"


HARMS = [
    *(tear, flip_a_bit, lose_a_file, lose_everything),
    *(lose_the_manifest, tear_the_manifest, empty_the_manifest, name_what_no_file_is_called),
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, harm):
    checkpoints = save(tmp_path, 4, 8)
    because = harm(tmp_path / "step-00008")
    found = run_virtual(checkpoints.find())
    assert found.path == tmp_path / "step-00004"
    (told,) = found.passed_over
    assert because in told
    assert "step-00008" in told
    restored = trainers()
    assert load(checkpoints, restored).step == 4
    assert restored[SOLVER].weight == 4.0


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm is not flip_a_bit])
def test_a_damaged_checkpoint_goes_and_does_not_push_out_an_intact_one(tmp_path, harm):
    save(tmp_path, 4, 8, keep=2)
    because = harm(tmp_path / "step-00008")
    (drop,) = save_step(checkpoints_in(tmp_path), 12).dropped
    assert drop.step == 8
    assert because in drop.because
    assert names(tmp_path) == ["step-00004", "step-00012"]


def test_a_checkpoint_behind_which_the_run_went_back_goes_at_the_next_save(tmp_path):
    checkpoints = save(tmp_path, 4, 8)
    flip_a_bit(tmp_path / "step-00008")
    assert load(checkpoints, trainers()).step == 4
    (drop,) = save_step(checkpoints, 6).dropped
    assert (drop.step, drop.because) == (8, "the run went back behind it, and is at step 6 now")
    assert names(tmp_path) == ["step-00004", "step-00006"]


def test_a_checkpoint_that_is_read_stays_until_it_is_read_though_the_run_goes_on(tmp_path):
    checkpoints = save(tmp_path, 4, keep=1)
    with checkpoints.reading("newest") as path:
        save_step(checkpoints, 8)
        assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00008"]
        assert path.name == "step-00004"
        restored = trainers()
        assert run_virtual(checkpoints.restore(path, restored)).step == 4
        assert restored[SOLVER].weight == 4.0
    assert [one.name for one in tmp_path.iterdir()] == ["step-00008"]


@pytest.mark.parametrize("at", ["chosen", "linked"])
def test_a_checkpoint_that_goes_before_it_can_be_read_is_replaced_by_the_newest(tmp_path, at, monkeypatch):
    checkpoints = save(tmp_path, 4, keep=1)
    choose, goes_on = checkpoints.chosen, iter([8])

    def chosen(which):
        found = choose(which) if at == "linked" else None
        for step in goes_on:
            save_step(checkpoints, step)
            if at == "chosen":
                raise CheckpointError("it went while it was read")
        return found or choose(which)

    monkeypatch.setattr(checkpoints, "chosen", chosen)
    with checkpoints.reading("newest") as path:
        assert path.name == "step-00008"
        assert run_virtual(checkpoints.restore(path, trainers())).step == 8


def test_where_no_links_can_be_made_the_checkpoint_itself_is_read(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError("links are not supported")

    checkpoints = save(tmp_path, 4)
    monkeypatch.setattr("flexmarl.orchestrator.checkpoint.os.link", refused)
    with checkpoints.reading("newest") as path:
        assert path == tmp_path / "step-00004"
    monkeypatch.setattr("flexmarl.orchestrator.checkpoint.os.access", lambda *_: False)
    with checkpoints.reading(4) as path:
        assert path == tmp_path / "step-00004"
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"), checkpoints.reading(5):
        pass


def test_when_none_is_intact_the_error_says_what_is_wrong_with_each_and_what_to_do(tmp_path):
    checkpoints = save(tmp_path, 4)
    tear(tmp_path / "step-00004")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*trainer.json is torn: .*Put back a copy"):
        load(checkpoints, trainers())
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere; train first"):
        load(checkpoints_in(tmp_path / "nowhere"), trainers())


@pytest.mark.parametrize("fails_at", [0, 1])
@pytest.mark.parametrize(
    ("error", "seen_as"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), CheckpointError),
        (TrainingError("the trainer is gone"), TrainingError),
    ],
)
def test_a_save_that_breaks_off_leaves_the_older_ones_and_no_trace(tmp_path, fails_at, error, seen_as):
    checkpoints = save(tmp_path, 4)
    broken = list(trainers(version=8).items())

    async def breaks(path):
        path.mkdir(parents=True)
        raise error

    broken[fails_at][1].save = breaks
    with pytest.raises(seen_as, match=r"No space left on device|the trainer is gone"):
        run_virtual(checkpoints.save(state(8), dict(broken)))
    assert names(tmp_path) == ["step-00004"]
    save_step(checkpoints, 8)
    assert names(tmp_path) == ["step-00004", "step-00008"]


def test_a_disk_that_has_no_room_for_one_more_is_noticed_before_anything_is_written(tmp_path):
    checkpoints = save(tmp_path, 4)
    huge = 8 * 2**40
    os.truncate(tmp_path / "step-00004" / "solver" / "trainer.json", huge)  # A sparse file: it takes no space.
    manifest = tmp_path / "step-00004" / "MANIFEST.json"
    sealed = json.loads(manifest.read_text())
    sealed["solver/trainer.json"]["bytes"] = huge
    manifest.write_text(json.dumps(sealed))
    with pytest.raises(
        CheckpointError, match=r"no room for a checkpoint as big .*: it takes about 8.8e\+03 GB, .* free"
    ):
        save_step(checkpoints, 8)
    assert names(tmp_path) == ["step-00004"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    run_virtual(checkpoints_in(tmp_path).save(state(4), trainers(weight=7.0, version=4)))
    restored = trainers()
    load(checkpoints_in(tmp_path), restored)
    assert restored[SOLVER].weight == 7.0


def test_a_checkpoint_of_another_run_names_the_policy_it_lacks(tmp_path):
    checkpoints = save(tmp_path, 4)
    others = {PolicyName("critic"): FakeTrainer(PolicyName("critic"), InlineObjectStore())}
    with pytest.raises(CheckpointError, match="has no policy 'critic'; it has: solver, verifier"):
        load(checkpoints, others)


def test_versions_that_disagree_are_an_error(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    run_virtual(checkpoints.save(state(5), trainers(version=4)))
    with pytest.raises(CheckpointError, match="'solver' is at version 4, not 5"):
        load(checkpoints, trainers())


ACTIVE = {"group": 1, "position": 0, "attempt": 0}


@pytest.mark.parametrize(
    ("harm", "field"),
    [
        *(({"step": value}, "step") for value in ("4", None, 4.5, True, -1, 10**30)),
        *(({"wall_s": value}, "wall_s") for value in ("1", None, True, -1.0)),
        ({"versions": None}, "state.json"),
        *(({"versions": {"solver": value, "verifier": 4}}, "versions.solver") for value in ("4", 4.0, None, -1)),
        *(({"admission": {"next_group": value}}, "admission.next_group") for value in ("8", None, 8.5, -3)),
        *(({"admission": {"next_position": value}}, "admission.next_position") for value in ("8", -3)),
        *(({"admission": {"again": value}}, "admission.again") for value in ("ab", [None], [-1])),
        *(({"admission": {"expiries": [value]}}, "admission.expiries") for value in (["a", 1], [1, None])),
        *(({"admission": {"active": [ACTIVE | {name: "a"}]}}, f"admission.active.{name}") for name in ACTIVE),
        ({"admission": {"active": [ACTIVE | {"group": 99}]}}, "admission.active.group"),
    ],
)
def test_a_state_with_a_value_of_another_kind_is_refused_by_file_and_field(tmp_path, harm, field):
    checkpoints = save(tmp_path, 4)
    folder = tmp_path / "step-00004"
    written = json.loads((folder / "state.json").read_text())
    harm = {**harm, "admission": written["admission"] | harm.get("admission", {})}
    (folder / "state.json").write_text(json.dumps(written | harm))
    (folder / MANIFEST).unlink()
    seal(folder)
    with pytest.raises(CheckpointError, match=r"state\.json") as refused:
        load(checkpoints, trainers())
    assert field in str(refused.value)


def test_a_process_killed_at_any_moment_of_saving_leaves_a_newest_checkpoint_that_is_whole(tmp_path):
    """Real processes and kill -9; a pipe tells after which step each was killed."""
    left_half_written = 0
    kills = 0
    while kills < 20 or (not left_half_written and kills < 200):
        kills += 1
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            checkpoints = checkpoints_in(tmp_path)
            for step in count(1):
                save_step(checkpoints, 1000 * kills + step)
                os.write(tell, b".")
        os.close(tell)
        saved = sum(len(os.read(told, 1)) for _ in range(1 + kills % 4))
        time.sleep(kills % 10 * 2e-4)  # A save takes about a millisecond: the kill comes at any moment of it.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(told, "rb") as rest:
            saved += len(rest.read())
        checkpoints = checkpoints_in(tmp_path)
        left_half_written += len(checkpoints.clear_partial())
        found = run_virtual(checkpoints.find())
        assert found.passed_over == []
        restored = trainers()
        step = load(checkpoints, restored).step
        assert step in (1000 * kills + saved, 1000 * kills + saved + 1), "the last one that was told of, or one more"
        assert {trainer.weight for trainer in restored.values()} == {float(step)}
    assert left_half_written, "no kill came while a checkpoint was written: nothing was tested"
