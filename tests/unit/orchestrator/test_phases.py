"""Policies that are trained in turns, and references that follow their policies, in whole scripted runs."""

import pytest

from flexmarl.events.group_events import GroupFiltered
from flexmarl.events.training_events import MicroBatchDone, Published, ReferenceReset, Rested, Updated
from flexmarl.records import PolicyName, RowState
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
TWO = {"solver": "solver", "verifier": "verifier"}
EVERY_OTHER = [{"steps": 1}, {"steps": 1, "train": False}]


def phased(phases, *, steps=4, policy="solver", agents=TWO, **more):
    policies = {name: {"model": "-"} for name in dict.fromkeys(agents.values())}
    policies[policy]["training"] = {"phases": phases}
    return ScriptedRun(agents=agents, steps=steps, policies=policies, **more)


@pytest.mark.parametrize("more", [{}, {"mode": "sync"}, {"pipeline": {"ahead": True}}, {"deterministic": True}])
def test_a_resting_policy_keeps_its_version_and_the_others_go_on(more):
    run = phased(EVERY_OTHER, **more).play()
    assert [(run.trainers[policy].version) for policy in (SOLVER, VERIFIER)] == [2, 4]
    assert [(one.policy, one.step) for one in run.events.of(Rested)] == [(SOLVER, 1), (SOLVER, 3)]
    assert [one.version for one in run.events.of(Published) if one.policy == SOLVER] == [0, 1, 2]
    assert len([one for one in run.events.of(Updated) if one.policy == VERIFIER]) == 4


def test_the_rows_of_a_resting_policy_end_filtered_with_the_reason():
    run = phased(EVERY_OTHER, steps=2).play()
    reasons = {(row.policy, row.state, row.reason) for row in run.rows()}
    assert (SOLVER, RowState.FILTERED, "the policy rests from step 2 to 2 (training.phases)") in reasons
    assert {state for policy, state, _ in reasons if policy == VERIFIER} == {RowState.TRAINED}
    trained = [one for one in run.events.of(MicroBatchDone) if one.policy == SOLVER]
    assert trained, "witness: it was trained in the first step"


def test_a_team_that_rests_as_a_whole_trains_nothing_and_goes_on():
    run = phased(EVERY_OTHER, steps=3, agents={"solver": "solver"}).play()
    assert run.trainers[SOLVER].version == 2
    because = {one.because for one in run.events.of(GroupFiltered)}
    assert because == {"the policy rests from step 2 to 2 (training.phases)"}


def test_a_run_without_waiting_refuses_phases():
    with pytest.raises(ValueError, match=r"phases counts steps .* but in mode 'async'.* use mode=microbatch"):
        phased(EVERY_OTHER, mode="async")


def test_phases_that_never_train_are_refused():
    with pytest.raises(ValueError, match="none of the 1 phases has train: true"):
        phased([{"steps": 3, "train": False}])


def following(reset, *, steps, **more):
    policies = {"solver": {"model": "-", "training": {"kl": {"reset": reset}}}}
    return ScriptedRun(agents={"solver": "solver"}, steps=steps, policies=policies, **more)


def test_a_reference_is_reset_every_k_steps():
    run = following({"every": 2}, steps=5).play()
    assert [(one.step, one.version) for one in run.events.of(ReferenceReset)] == [(2, 2), (4, 4)]
    assert [one.because for one in run.events.of(ReferenceReset)] == [
        "2 steps have passed since step 0 (kl.reset.every)",
        "2 steps have passed since step 2 (kl.reset.every)",
    ]


def test_a_reference_is_reset_when_held_out_success_stands_still():
    run = following({"patience": 2}, steps=5, evaluate={"tasks": 4, "every": 1, "every_tasks": 4, "temperature": 0})
    run.play()
    (first, *_) = run.events.of(ReferenceReset)
    assert first.because.startswith("success has not been above")
    assert first.because.endswith("in 2 evaluations (kl.reset.patience)")


def test_patience_without_evaluations_is_refused():
    with pytest.raises(ValueError, match=r"kl\.reset: evaluations are compared, but evaluate\.every is 0"):
        following({"patience": 2}, steps=2, evaluate={"tasks": 4})


def test_a_reset_without_a_moment_is_refused():
    with pytest.raises(ValueError, match="every and patience are null"):
        following({}, steps=2)
