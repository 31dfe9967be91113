"""Synchronous steps: every policy updates by itself, engines and trainers change places, episodes train alone."""

import asyncio

import pytest

from flexmarl.errors import EpisodeError, TrainingError
from flexmarl.events.group_events import GroupAdmitted, GroupFailed, GroupReady, GroupRetried, RolloutEnded
from flexmarl.events.run_events import StepEnded
from flexmarl.events.serving_events import Called
from flexmarl.events.training_events import MicroBatchDone, Published
from flexmarl.orchestrator.collect import Release
from flexmarl.records import Divisors, GroupState, PolicyName, RowState, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.scripted_run import ScriptedRun
from tests.unit.orchestrator.groups import SOLVER, Bench, episode_of, group_of, slowed

VERIFIER = PolicyName("verifier")
TWO = {"solver": "solver", "verifier": "verifier"}
BY_ROW = {"filter": None, "estimator": {"type": "reinforce"}, "ready": "trajectory"}


def longer_if_wrong(prompt, request):
    return "a" if request.seed % 2 else "bbb"


def at(run, event):
    return {(entry.policy, entry.t) for entry in run.events.of(event)}


def slow_step(run, policy, seconds):
    step = run.trainers[policy].step

    async def slowly(divisors):
        await asyncio.sleep(seconds)
        return await step(divisors)

    run.trainers[policy].step = slowly


def test_a_policy_is_served_as_soon_as_its_own_update_is_done():
    run = ScriptedRun(agents=TWO)
    slow_step(run, SOLVER, 5.0)
    slow_step(run, VERIFIER, 7.0)
    run.play()
    assert {entry for entry in at(run, Published) if entry[1]} == {(SOLVER, 5.4), (VERIFIER, 7.4)}
    assert run.events.of(StepEnded)[0].t == 7.4


def test_a_rollout_that_fails_is_in_the_journal_too():
    run = ScriptedRun(num_tasks=1)
    with pytest.raises(SourceExhausted):
        run.play()
    assert [entry.step for entry in run.events.of(RolloutEnded)] == [0]


@pytest.mark.parametrize("steps", [1, 3])
def test_colocated_engines_and_trainers_are_never_awake_together(steps):
    run = ScriptedRun(agents=TWO, mode="colocated", steps=steps, seconds_per_sample=0.5)
    seen: list[str] = []

    def told(engine):
        for name in ("sleep", "wake", "load_weights"):
            do = getattr(engine, name)

            async def and_say(*args, do=do, name=name):
                seen.append(name)
                return await do(*args)

            setattr(engine, name, and_say)

    for engines in run.engines.values():
        told(engines[0])
    for trainer in run.trainers.values():
        accumulate = trainer.accumulate

        async def and_say(micro_batch_id, ids, accumulate=accumulate):
            seen.append("train")
            return await accumulate(micro_batch_id, ids)

        trainer.accumulate = and_say
    run.play()
    step = ["sleep", "sleep", "train", "train", "wake", "wake", "load_weights", "load_weights"]
    assert seen == ["load_weights"] * 2 + step * steps
    assert [trainer.version for trainer in run.trainers.values()] == [steps, steps]


def test_colocated_makes_the_update_that_sync_makes():
    colocated, sync = (
        ScriptedRun(say=longer_if_wrong, agents=TWO, mode=mode, steps=2, batch={"groups": 3, "episodes": 4}).play()
        for mode in ("colocated", "sync")
    )
    assert colocated.trainers[SOLVER].weight == sync.trainers[SOLVER].weight != 0.0
    assert [(row.sample_id, row.state) for row in colocated.rows()] == [
        (row.sample_id, row.state) for row in sync.rows()
    ]


def test_an_episode_is_ready_when_it_ends_and_its_group_still_ends_once():
    async def scenario():
        bench = Bench(groups=1, release=Release.BY_EPISODE, **BY_ROW)
        group = group_of(0, [0.0, 1.0])
        await bench.play(group)
        await bench.collector.take_episode(group, group.episodes[1])
        assert await bench.states() == ["open", "ready"]
        await bench.collector.take_episode(group, group.episodes[0])
        assert bench.events.of(GroupReady) == []
        await bench.collector.take(group)
        (ready,) = bench.events.of(GroupReady)
        assert ready.samples == {SOLVER: 2}
        divisors = await bench.collector.close()
        assert divisors[SOLVER] == Divisors(num_tokens=4.0, num_sequences=2.0, num_trajectories=2.0)
        assert bench.collector.settle_trained(bench.collector.kept) == [0]
        assert bench.admission.ended == {GroupState.TRAINED: 1}

    run_virtual(scenario())


def test_episodes_that_end_while_the_store_writes_become_ready_together():
    async def scenario():
        bench, group = Bench(groups=1, release=Release.BY_EPISODE, **BY_ROW), group_of(0, [0.0, 1.0] * 20)
        await bench.play(group)
        written = slowed(bench.store)
        async with asyncio.TaskGroup() as tasks:
            for episode in group.episodes:
                tasks.create_task(bench.collector.take_episode(group, episode))
        assert written == {"put": [1, 32, 7], "ready": [1, 32, 7]}
        assert (await bench.collector.close())[SOLVER].num_trajectories == 40

    run_virtual(scenario())


def test_a_group_whose_episodes_had_no_weight_is_filtered_once():
    async def scenario():
        bench = Bench(groups=1, release=Release.BY_EPISODE, **BY_ROW)
        group = group_of(0, [1.0, None], tokens=0)
        await bench.play(group)
        await bench.collector.take_episode(group, group.episodes[0])
        await bench.collector.take(group)
        assert bench.admission.ended == {GroupState.FILTERED: 1}
        assert await bench.states() == ["filtered", "open"]  # the failed one's row is its recorder's to end

    run_virtual(scenario())


def test_the_first_episode_of_a_group_trains_while_the_second_one_plays():
    plays: list[str] = []

    async def second_is_slow(task, team):
        plays.append(task.input_id)
        await asyncio.sleep(20.0 if plays.count(task.input_id) == 2 else 0.8)
        (await team.solver.act(task.prompt)).reward(1.0)

    def trained_at(ready):
        plays.clear()
        run = ScriptedRun(
            second_is_slow,
            seconds_per_sample=1.0,
            policies={"solver": {"training": {"micro_batch": 1}}},
            credit={**BY_ROW, "ready": ready},
        ).play()
        assert {row.state for row in run.rows()} == {RowState.TRAINED}
        return [entry.t for entry in run.events.of(MicroBatchDone)], run.trainers[SOLVER].weight

    (streamed, weight), (whole, same_weight) = trained_at("trajectory"), trained_at("group")
    assert streamed == [2.0, 3.0, 21.2, 22.2]
    assert whole == [21.2, 22.2, 23.2, 24.2]
    assert weight == same_weight


def test_deterministic_runs_wait_for_whole_groups_in_order():
    runs = [
        ScriptedRun(
            credit=BY_ROW | {"ready": "group"},
            deterministic=True,
            rollout={"inter_query": n},
            batch={"groups": 4, "episodes": 2},
        )
        for n in (1, 4)
    ]
    one, two = [
        [[s.turn.sample_id for s in batch.samples] for batch in run.play().trainers[SOLVER].accumulated] for run in runs
    ]
    assert one == two


def test_in_lockstep_no_agent_goes_on_before_all_have_had_their_turn():
    calls: list[tuple[str, float]] = []

    async def duet(task, team):
        first = await team.solver.act(task.prompt)
        calls.append(("solver", asyncio.get_running_loop().time()))
        second = await team.verifier.act("?")
        calls.append(("verifier", asyncio.get_running_loop().time()))
        first.reward(1.0)
        second.reward(1.0)

    slow = lambda prompt, request: "a" * (1 + 40 * (request.policy == SOLVER and request.seed % 2))  # noqa: E731
    for order in ("lockstep", "free"):
        calls.clear()
        ScriptedRun(duet, slow, agents=TWO, rollout={"order": order}, batch={"groups": 1, "episodes": 8}).play()
        solvers, verifiers = ([t for agent, t in calls if agent == name] for name in ("solver", "verifier"))
        assert min(solvers) < max(solvers)
        assert (max(solvers) < min(verifiers)) == (order == "lockstep")


def test_an_episode_of_one_group_is_refused_at_another_version():
    async def scenario():
        bench = Bench(groups=1, release=Release.BY_EPISODE, **BY_ROW)
        bench.versions.acknowledged(SOLVER, Version(1))
        with pytest.raises(TrainingError, match="version 0 of 'solver', but this step is trained on version 1"):
            await bench.collector.take_episode(group_of(0, [1.0]), episode_of(0, 0, 1.0))

    run_virtual(scenario())


def slow_updates(*workflow, **sections):
    run = ScriptedRun(*workflow, agents=TWO, seconds_per_token=0.1, **{"steps": 2, **sections})
    slow_step(run, SOLVER, 5.0)
    slow_step(run, VERIFIER, 7.0)
    return run


def two_steps(**sections):
    return slow_updates(**sections).play()


def test_ahead_the_next_rollout_begins_at_once_and_a_call_waits_for_its_own_policy_only():
    behind, ahead = two_steps(), two_steps(pipeline={"ahead": True})
    assert behind.events.of(StepEnded)[1].t == pytest.approx(14.8)
    began = [event.began for event in ahead.events.of(RolloutEnded)]
    assert began == [0.0, 0.4]
    second = [(event.policy, event.began) for event in ahead.events.of(Called) if event.version == 1]
    assert {began for policy, began in second if policy == SOLVER} == {5.4}
    assert {began for policy, began in second if policy == VERIFIER} == {7.4}
    assert ahead.events.of(StepEnded)[1].t == pytest.approx(14.6)


def test_ahead_every_token_is_of_its_step_and_what_is_trained_is_the_same():
    behind, ahead = two_steps(), two_steps(pipeline={"ahead": True})
    assert [(row.sample_id, row.version, row.settled_version) for row in ahead.rows()] == [
        (row.sample_id, row.version, row.settled_version) for row in behind.rows()
    ]
    assert {name: trainer.weight for name, trainer in ahead.trainers.items()} == {
        name: trainer.weight for name, trainer in behind.trainers.items()
    }


def test_before_a_save_rollout_is_not_ahead(tmp_path):
    run = ScriptedRun(agents=TWO, steps=2, pipeline={"ahead": True}, checkpoint={"every": 1}, folder=tmp_path).play()
    ended = run.events.of(StepEnded)[0].t
    assert all(event.t >= ended for event in run.events.of(GroupAdmitted) if event.step == 1)


def test_ahead_an_episode_has_its_whole_time_after_its_policies_serve_the_new_version():
    rollout = {"episode_timeout_s": 2.0}  # The updates take 5 and 7 s.
    run = two_steps(rollout=rollout, pipeline={"ahead": True})
    assert run.events.of(GroupRetried) == []
    assert len(run.events.of(StepEnded)) == 2


def test_ahead_an_episode_that_hangs_still_ends_as_timed_out():
    async def second_step_hangs(task, team):
        (await team.solver.act(task.prompt)).reward(1.0)
        (await team.verifier.act("?")).reward(1.0)
        if task.input_id in ("task-2", "task-3"):
            await asyncio.sleep(900.0)

    rollout = {"episode_timeout_s": 2.0, "group_retries": 0}
    run = slow_updates(second_step_hangs, rollout=rollout, pipeline={"ahead": True})
    with pytest.raises(EpisodeError, match=r"step 2: none of its 2 groups .* took longer than .*episode_timeout_s=2"):
        run.play()
    assert [event.t for event in run.events.of(GroupFailed)] == pytest.approx([9.2, 9.2])


@pytest.mark.parametrize("ahead", [False, True])
def test_when_the_tasks_are_over_the_steps_that_can_be_filled_are_done_and_then_it_is_an_error(ahead):
    run = slow_updates(num_tasks=5, steps=3, pipeline={"ahead": ahead})
    with pytest.raises(SourceExhausted, match="no training task at position 5 of 5"):
        run.play()
    assert len(run.events.of(StepEnded)) == 2


def test_an_update_that_fails_ends_the_rollout_that_is_ahead_of_it():
    run = slow_updates(pipeline={"ahead": True})

    async def fails(divisors):
        await asyncio.sleep(1.0)
        raise TrainingError("the device is gone")

    run.trainers[SOLVER].step = fails
    with pytest.raises(TrainingError, match="the device is gone"):
        run.play()
    assert run.events.all[-1].t == pytest.approx(1.4)
