"""Held-out tasks against pinned versions."""

import asyncio

import pytest

from flexmarl.errors import TrainingError
from flexmarl.events.run_events import Evaluated
from flexmarl.orchestrator.evaluation import Evaluator, mean_metrics
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import (
    Episode,
    EpisodeId,
    EpisodeStatus,
    GroupId,
    PolicyName,
    Purpose,
    Task,
    Version,
    split_sample_id,
    split_trajectory_id,
)
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.scripted_run import ScriptedRun
from tests.unit.rollout.plays import now, player

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
TASKS = tuple(Task(input_id=f"test-{i}", prompt=f"{i}+{i}", reference=str(2 * i)) for i in range(4))


async def fragile(task, team):
    if task.prompt == "3+3":
        raise ValueError("three is too many")
    reply = await team.solver.act(task.prompt)
    reply.reward(task.score(reply.text))
    team.report(success=task.score(reply.text), length=len(reply.text))


def evaluator(workflow=fragile, *, versions=None, episodes=1, parallel=100):
    one, model = player(workflow, lambda prompt, request: "2")
    versions = versions or Versions({SOLVER: Version(0), VERIFIER: Version(0)})
    made = Evaluator(player=one, versions=versions, tasks=TASKS, episodes=episodes, parallel=parallel)
    return made, model


def test_a_failed_episode_counts_as_no_success_and_in_no_other_mean():
    evaluation = run_virtual(evaluator()[0].run())
    assert (evaluation.episodes, evaluation.failed, evaluation.tokens) == (4, 1, 6)
    assert dict(evaluation.metrics) == {"success": 0.25, "length": 1.0}
    assert dict(evaluation.rewards) == {"solver": pytest.approx(1 / 3)}
    assert dict(evaluation.versions) == {"solver": 0, "verifier": 0}


def test_when_all_fail_success_is_zero_not_missing():
    failed = Episode(episode=EpisodeId("g0e0a0"), group=GroupId(0), task="t", status=EpisodeStatus.TIMED_OUT)
    assert mean_metrics([failed, failed]) == {"success": 0.0}


def test_two_evaluations_make_the_same_calls_and_share_no_seed_with_training():
    async def scenario():
        one, model = evaluator(episodes=2)
        await one.run()
        first = [(request.request_id, request.seed) for request in model.requests]
        await one.run()
        assert [(request.request_id, request.seed) for request in model.requests[6:]] == first
        assert len(set(first)) == 6
        assert {request.purpose for request in model.requests} == {Purpose.EVALUATION}
        groups = {split_trajectory_id(split_sample_id(request_id)[2])[0] for request_id, _ in first}
        assert min(groups) > 10**8, "no run has admitted so many groups"

    run_virtual(scenario())


def test_only_the_first_tasks_when_asked_and_only_so_many_episodes_at_once():
    async def scenario():
        one, model = evaluator(parallel=2, episodes=3)
        assert (await one.run(2)).episodes == 6
        assert now() == 3.0
        assert len(model.requests) == 6

    run_virtual(scenario())


def test_weights_that_change_during_an_evaluation_are_an_error():
    async def scenario():
        versions = Versions({SOLVER: Version(0), VERIFIER: Version(0)})
        one, _ = evaluator(versions=versions)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(0.5)
        versions.acknowledged(SOLVER, Version(1))
        with pytest.raises(TrainingError, match=r"weights changed during an evaluation pinned to {'solver': 0"):
            await running

    run_virtual(scenario())


def test_a_turn_of_another_version_than_the_pinned_one_is_an_error():
    with pytest.raises(TrainingError, match=r"was sampled by version 0 of 'solver', but .* version 9"):
        run_virtual(evaluator(versions=Versions({SOLVER: Version(9), VERIFIER: Version(0)}))[0].run())


def test_a_run_evaluates_before_after_and_in_between_and_records_none_of_it():
    run = ScriptedRun(steps=4, evaluate={"tasks": 6, "every": 2, "every_tasks": 3, "temperature": 0.5}).play()
    seen = [(e.when, e.step, e.evaluation["episodes"], e.evaluation["versions"]) for e in run.events.of(Evaluated)]
    assert seen == [("before", 0, 6, {"solver": 0}), ("between", 2, 3, {"solver": 2}), ("after", 4, 6, {"solver": 4})]
    assert run.outcome is not None
    assert run.outcome.before is not None
    assert run.outcome.after is not None
    assert run.outcome.before.metrics == run.outcome.after.metrics  # scripted: the weights do not matter
    assert {step for step, values in run.metrics.items() if "eval/team/success" in values} == {0, 2, 4}
    assert not any(row.sample_id.startswith("test") for row in run.rows())
