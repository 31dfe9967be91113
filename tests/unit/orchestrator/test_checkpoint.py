"""Checkpoints are whole or do not count."""

import json
import shutil

import pytest

from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.orchestrator.checkpoint import Checkpoints, RunState, verify
from flexmarl.orchestrator.evaluate import Evaluation
from flexmarl.records import AgentName, PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer

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
        tokens=80,
    )
    return RunState(step=step, next_group=40, versions={SOLVER: Version(step), VERIFIER: Version(step)}, before=before)


def save(folder, *steps, keep=2):
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        run_virtual(checkpoints.save(state(step), trainers(weight=float(step), version=step)))
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    checkpoints = save(tmp_path, 4)
    restored = trainers()
    assert run_virtual(checkpoints.load(restored)) == state(4)
    assert {(trainer.weight, trainer.version) for trainer in restored.values()} == {(4.0, 4)}
    assert names(tmp_path / "step-00004") == ["MANIFEST.json", "solver", "state.json", "verifier"]


def test_a_state_without_an_evaluation_comes_back_too(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    bare = RunState(step=1, next_group=2, versions={SOLVER: Version(0), VERIFIER: Version(0)})
    run_virtual(checkpoints.save(bare, trainers()))
    assert run_virtual(checkpoints.load(trainers())) == bare


def test_the_newest_stay_and_the_oldest_go(tmp_path):
    checkpoints = save(tmp_path, 1, 2, 3, 99_999, 100_000, keep=3)
    assert names(tmp_path) == ["step-00003", "step-100000", "step-99999"]
    assert checkpoints.latest().name == "step-100000"


def tear(folder):
    file = folder / "solver" / "trainer.json"
    file.write_text(file.read_text()[:-3])


def lose_a_file(folder):
    (folder / "state.json").unlink()


def lose_the_manifest(folder):
    (folder / "MANIFEST.json").unlink()


def lose_everything(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("harm", [tear, lose_a_file, lose_the_manifest, lose_everything])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, harm):
    checkpoints = save(tmp_path, 4, 8)
    harm(tmp_path / "step-00008")
    assert checkpoints.latest().name == "step-00004"
    restored = trainers()
    assert run_virtual(checkpoints.load(restored)).step == 4
    assert restored[SOLVER].weight == 4.0
    with pytest.raises(
        CheckpointError, match=r"step-00008.*(torn: .* bytes were written|is not a complete checkpoint)"
    ):
        run_virtual(checkpoints.load(trainers(), tmp_path / "step-00008"))


@pytest.mark.parametrize("harm", [tear, lose_a_file, lose_the_manifest, lose_everything])
def test_a_damaged_checkpoint_does_not_push_out_an_intact_one(tmp_path, harm):
    save(tmp_path, 4, 8, keep=2)
    harm(tmp_path / "step-00008")
    save(tmp_path, 12, keep=2)
    verify(tmp_path / "step-00004")
    verify(tmp_path / "step-00012")


def test_when_none_is_intact_the_error_says_what_is_wrong_with_each(tmp_path):
    checkpoints = save(tmp_path, 4)
    tear(tmp_path / "step-00004")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*trainer.json is torn: .* train anew"):
        checkpoints.latest()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*; train anew"):
        Checkpoints(tmp_path / "nowhere", keep=1).latest()


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_save_that_breaks_off_leaves_the_older_ones_and_no_checkpoint(tmp_path, fails_at):
    checkpoints = save(tmp_path, 4)
    broken = list(trainers(version=8).items())

    async def full_disk(path):
        raise TrainingError("no space left on device")

    broken[fails_at][1].save = full_disk
    with pytest.raises(TrainingError, match="no space left"):
        run_virtual(checkpoints.save(state(8), dict(broken)))
    assert checkpoints.latest().name == "step-00004"
    save(tmp_path, 8)
    assert (checkpoints.latest().name, names(tmp_path)) == ("step-00008", ["step-00004", "step-00008"])


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    run_virtual(Checkpoints(tmp_path, keep=2).save(state(4), trainers(weight=7.0, version=4)))
    restored = trainers()
    run_virtual(Checkpoints(tmp_path, keep=2).load(restored))
    assert restored[SOLVER].weight == 7.0


def test_a_checkpoint_of_another_run_names_the_policy_it_lacks(tmp_path):
    checkpoints = save(tmp_path, 4)
    others = {PolicyName("critic"): FakeTrainer(PolicyName("critic"), InlineObjectStore())}
    with pytest.raises(CheckpointError, match="has no policy 'critic'; it has: solver, verifier"):
        run_virtual(checkpoints.load(others))


def test_versions_that_disagree_are_an_error(tmp_path):
    save(tmp_path, 4)
    path = tmp_path / "step-00004"
    told = json.loads((path / "state.json").read_text())
    text = json.dumps({**told, "versions": {"solver": 4, "verifier": 5}}, indent=1)
    (path / "state.json").write_text(text)
    assert len(text) == json.loads((path / "MANIFEST.json").read_text())["state.json"]
    with pytest.raises(CheckpointError, match="'verifier' is at version 4, not 5"):
        run_virtual(Checkpoints(tmp_path, keep=1).load(trainers()))
