"""From rewards to weights through the whole pipeline: what must not change an update, and what an update may change."""

import asyncio
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.errors import FlexmarlError
from flexmarl.records import PolicyName
from flexmarl.testing.scripted_run import ScriptedRun

TEAM = {"solver": "solver", "verifier": "verifier", "judge": "frozen"}
SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
some = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def run_of(*, seed=0, slow=5.0, silent=(), micro_batch=2, **sections) -> ScriptedRun:
    """Agents in `silent` give all their turns the same reward, so that they learn nothing."""

    async def workflow(task, team) -> None:
        for seat in team:
            reply = await seat.act(task.prompt)
            random = Random(f"{seed}/{seat.name}/{reply.turns[0].episode}")
            await asyncio.sleep(slow * random.random())
            reply.reward(1.0 if seat.name in silent else float(random.randrange(3)))

    training = {"training": {"micro_batch": micro_batch}}
    policies = {"solver": training, "verifier": training, "frozen": {"trainable": False}}
    shape = {"steps": 3, "batch": {"groups": 3, "episodes": 3}, "credit": {"filter": {"reward_range": [0, 2]}}}
    return ScriptedRun(workflow, agents=TEAM, seconds_per_sample=0.2, policies=policies, **{**shape, **sections})


def credit_of(run) -> dict:
    return {row.sample_id: (row.state, row.values.get("advantage"), row.settled_version) for row in run.rows()}


@given(seed=st.integers(0, 9999), micro_batch=st.integers(1, 7), streaming=st.booleans(), slow=st.floats(0, 9))
@some
def test_x1_and_g4_what_is_credited_and_trained_apart_gives_the_update_of_the_whole_step(
    seed, micro_batch, streaming, slow
):
    filtered = {"reward_range": [0, 2]}
    apart = run_of(
        seed=seed,
        slow=slow,
        micro_batch=micro_batch,
        credit={"filter": filtered, "streaming": "linear" if streaming else "off"},
    ).play()
    whole = run_of(seed=seed, slow=slow, micro_batch=1000, mode="sync", credit={"filter": filtered}).play()
    assert credit_of(apart) == credit_of(whole)
    for policy, trainer in apart.trainers.items():
        assert trainer.weight == pytest.approx(whole.trainers[policy].weight, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("streaming", ["off", "linear"])
def test_x2_only_the_weights_of_policies_that_learn_change(streaming):
    run = run_of(silent={"verifier"}, credit={"filter": None, "streaming": streaming}).play()
    assert run.trainers[SOLVER].weight != 0.0
    assert run.trainers[VERIFIER].weight == 0.0
    assert set(run.trainers) == {SOLVER, VERIFIER}
    assert {row.reason for row in run.rows() if row.agent == "judge"} == {"not a trained policy's turn"}


@pytest.mark.parametrize("streaming", ["off", "linear"])
@given(seed=st.integers(0, 9999), at=st.floats(0.5, 20.0), refill=st.booleans())
@settings(parent=some, max_examples=4)
def test_x4_killed_at_any_moment_and_resumed_it_has_the_same_credit_and_the_same_weights(
    tmp_path_factory, streaming, seed, at, refill
):
    credit = {"filter": {"reward_range": [0, 2], "refill": refill}, "streaming": streaming}

    def new(folder, **more):
        return run_of(seed=seed, credit=credit, checkpoint={"every": 1}, folder=folder, **more)

    undisturbed = new(tmp_path_factory.mktemp("whole")).play()
    folder = tmp_path_factory.mktemp("killed")
    first = new(folder)
    died = False

    async def strike(run) -> None:
        await asyncio.sleep(at)
        run.trainers[SOLVER].fail("as planned")

    try:
        first.play(strike)
    except FlexmarlError:
        died = True
    last = new(folder, store=first.store).play() if died else first
    assert credit_of(last) == credit_of(undisturbed)
    for policy, trainer in last.trainers.items():
        assert trainer.weight == pytest.approx(undisturbed.trainers[policy].weight, rel=1e-12)
