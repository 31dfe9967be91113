"""Whole runs: the loops together, in virtual time."""

import asyncio
import io

import pytest
from rich.console import Console

from flexmarl.errors import CreditError, EngineError, EpisodeError, StoreError, TrainingError
from flexmarl.events.group_events import GroupAdmitted, GroupFailed, GroupFiltered, GroupReady, GroupRetried
from flexmarl.events.progress import LineProgress
from flexmarl.events.run_events import Evaluated, Resumed, StepEnded, StepStarted
from flexmarl.events.serving_events import InstanceLost
from flexmarl.events.training_events import Published, Updated, UpdateSkipped
from flexmarl.records import PolicyName, RowState
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.scripted_run import ScriptedRun
from flexmarl.testing.training import FakeTrainer

SOLVER = PolicyName("solver")


async def staggered(task, team):
    """Group i ends after i + 1 seconds of thinking, and a tenth of a second per token."""
    await asyncio.sleep(int(task.prompt.split()[1]) % 4 + 0.8)
    reply = await team.solver.act(task.prompt)
    reply.reward(float(reply.text == "a"))


def staggered_run(mode, **sections):
    """Four groups that end at 1, 2, 3 and 4 s; the two samples of each train for one second."""
    return ScriptedRun(
        staggered,
        mode=mode,
        seconds_per_sample=0.5,
        **{
            "batch": {"groups": 4, "episodes": 2},
            "policies": {"solver": {"training": {"micro_batch": 2}}},
            **sections,
        },
    )


def at(run, event):
    return [entry.t for entry in run.events.of(event)]


def test_micro_batches_train_while_others_still_play_and_in_sync_mode_they_wait():
    pipelined, sync = staggered_run("microbatch").play(), staggered_run("sync").play()
    assert at(pipelined, GroupReady) == [1.0, 2.0, 3.0, 4.0]
    assert at(pipelined, Updated) == [5.0]  # three of four micro-batches were hidden behind rollout
    assert at(sync, GroupReady) == [4.0] * 4
    assert at(sync, Updated) == [8.0]


def test_both_modes_make_the_same_update():
    pipelined, sync = (staggered_run(mode, steps=3).play() for mode in ("microbatch", "sync"))
    assert pipelined.trainers[SOLVER].weight == pytest.approx(sync.trainers[SOLVER].weight, abs=1e-12)
    assert pipelined.trainers[SOLVER].version == sync.trainers[SOLVER].version == 3
    states = [[(row.sample_id, row.state, row.settled_version) for row in run.rows()] for run in (pipelined, sync)]
    assert states[0] == states[1]


def test_every_step_ends_before_the_next_begins():
    run = staggered_run("microbatch", steps=3).play()
    order = [entry.name for entry in run.events.all if entry.name.startswith("step_")]
    assert order == ["step_started", "step_ended"] * 3
    assert [entry.trained for entry in run.events.of(StepEnded)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert at(run, StepStarted) == [0.0, 5.0, 10.0]
    assert {row.state for row in run.rows()} == {RowState.TRAINED}
    assert sorted(run.metrics) == [0, 1, 2, 3]
    assert [run.metrics[step]["version/solver"] for step in range(4)] == [0, 1, 2, 3]
    assert run.metrics[1]["rollout/groups"] == 4


def test_nothing_is_admitted_before_every_instance_has_the_new_weights():
    class Late:
        """Loads take 30 s."""

        def __init__(self, engine):
            self.load, self.engine = engine.load_weights, engine
            engine.load_weights = self.later

        async def later(self, policy, version):
            await asyncio.sleep(30.0)
            return await self.load(policy, version)

    run = ScriptedRun(steps=2, policies={"solver": {"instances": 3}})
    Late(run.engines[SOLVER][2])
    run.play()
    published, admitted = at(run, Published), at(run, GroupAdmitted)
    assert published[:2] == [30.0, 60.2]
    assert admitted == [30.0, 30.0, 60.2, 60.2]
    assert {engine.version for engine in run.engines[SOLVER]} == {2}


def test_agents_of_one_policy_share_its_update_and_a_frozen_policy_gets_none():
    shared = ScriptedRun(agents={"solver": "one", "verifier": "one"}).play()
    assert shared.events.of(GroupReady)[0].samples == {"one": 4}
    assert [entry.policy for entry in shared.events.of(Updated)] == ["one"]

    mixed = ScriptedRun(
        agents={"solver": "solver", "judge": "frozen"}, policies={"frozen": {"trainable": False}}, steps=2
    ).play()
    assert {entry.policy for entry in mixed.events.of(Published)} == {"solver"}
    assert {row.state for row in mixed.rows() if row.agent == "judge"} == {RowState.FILTERED}
    assert mixed.events.of(StepEnded)[-1].versions == {"solver": 2, "frozen": 0}


def test_a_step_in_which_everything_is_filtered_makes_no_update_and_the_run_goes_on():
    run = ScriptedRun(say=lambda prompt, request: "a", steps=3, credit={}).play()
    assert len(run.events.of(GroupFiltered)) == 6
    assert [entry.because for entry in run.events.of(UpdateSkipped)] == ["no weighted token in the step"] * 3
    assert run.events.of(Updated) == []
    assert run.trainers[SOLVER].version == 0
    assert {row.state for row in run.rows()} == {RowState.FILTERED}
    assert run.outcome is not None
    assert run.outcome.steps == 3


async def broken(task, team):
    if int(task.prompt.split()[1]) >= 2:
        raise ValueError("the sandbox is down")
    (await team.solver.act(task.prompt)).reward(1.0)


def test_a_step_in_which_every_group_failed_ends_the_run_with_the_reason():
    run = ScriptedRun(broken, steps=3)
    with pytest.raises(EpisodeError, match=r"step 2: none of its 2 groups had a finished .*: the sandbox is down"):
        run.play()
    assert len(run.events.of(StepEnded)) == 1
    assert [entry.group for entry in run.events.of(GroupFailed)] == [2, 3]
    assert len(run.events.of(GroupRetried)) == 2


def test_a_step_in_which_one_group_failed_trains_the_others():
    run = ScriptedRun(broken, steps=1, batch={"groups": 3, "episodes": 2}).play()
    assert run.events.of(StepEnded)[0].trained == (0, 1)
    assert run.trainers[SOLVER].version == 1


def test_a_source_that_ends_in_a_step_gives_its_own_error():
    run = ScriptedRun(steps=3, num_tasks=3)
    with pytest.raises(SourceExhausted, match="no training task at position 3 of 3"):
        run.play()
    assert len(run.events.of(StepEnded)) == 1


def test_an_engine_that_is_lost_is_made_up_for_by_the_others():
    async def lose_one(run):
        await asyncio.sleep(0.15)
        run.engines[SOLVER][0].fail("power cut")

    run = ScriptedRun(steps=2, policies={"solver": {"instances": 2}}).play(lose_one)
    assert run.world.pool.lost == {"solver/0": "EngineError: power cut"}
    (event,) = run.events.of(InstanceLost)
    assert (event.instance, event.because) == ("solver/0", "EngineError: power cut")
    assert {row.state for row in run.rows()} == {RowState.TRAINED}
    assert run.trainers[SOLVER].version == 2


def test_when_no_engine_is_left_the_run_ends_with_the_reason():
    async def lose_all(run):
        await asyncio.sleep(0.15)
        run.engines[SOLVER][0].fail("power cut")

    with pytest.raises(EpisodeError, match=r"none of its 2 groups .* no instance of 'solver' is left: .*power cut"):
        ScriptedRun(steps=2).play(lose_all)

    async def lose_all_between_steps(run):
        await asyncio.sleep(4.1)
        run.engines[SOLVER][0].fail("power cut")

    with pytest.raises(EngineError, match=r"no instance of 'solver' serves version 1: .*power cut"):
        staggered_run("microbatch").play(lose_all_between_steps)


def test_a_trainer_that_breaks_ends_the_run_with_its_own_error_and_its_rows_are_not_lost():
    run = staggered_run("microbatch")
    run.trainers[SOLVER] = FakeTrainer(SOLVER, run.objects, sample_cost_s=0.5, fail_on=frozenset({"solver/0/1"}))
    with pytest.raises(TrainingError, match=r"accumulating micro-batch solver/0/1: .*scripted failure"):
        run.play()
    states = [row.state for row in run.rows() if row.sample_id[:6] in ("task-0", "task-1")]
    assert states == [RowState.ACCUMULATED] * 2 + [RowState.READY] * 2


def test_a_store_that_is_lost_ends_the_run():
    async def close(run):
        await asyncio.sleep(2.5)
        await run.store.close()

    with pytest.raises(StoreError, match="the experience store is closed"):
        staggered_run("microbatch").play(close)


def test_a_group_whose_contexts_differ_where_credit_claims_they_are_equal_ends_the_run():
    async def own_words(task, team):
        (await team.solver.act(f"{task.prompt} {team.rng.random()}")).reward(1.0)

    with pytest.raises(CreditError, match="breaks one_context: its rows have 2 values of 'context_hash'"):
        ScriptedRun(
            own_words, credit={"filter": None, "estimator": {"type": "grpo", "require": ["one_context"]}}
        ).play()
    ScriptedRun(credit={"filter": None, "estimator": {"type": "grpo", "require": ["one_context"]}}).play()


def consumed(run):
    return [[s.turn.sample_id for s in batch.samples] for batch in run.trainers[SOLVER].accumulated]


@pytest.mark.parametrize("mode", ["sync", "microbatch"])
@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_a_resumed_run_consumes_what_an_undisturbed_one_does(tmp_path, mode, stopped_after):
    sections = {"checkpoint": {"every": 1}, "evaluate": {"tasks": 2}, "deterministic": True}
    whole = staggered_run(mode, steps=4, folder=tmp_path / "whole", **sections).play()

    def part(steps):
        return staggered_run(mode, steps=steps, folder=tmp_path / "parts", **sections).play()

    first, second = part(stopped_after), part(4)
    assert second.events.of(Resumed)[0].next_group == 4 * stopped_after
    assert consumed(first) + consumed(second) == consumed(whole)
    assert second.trainers[SOLVER].weight == whole.trainers[SOLVER].weight
    assert second.trainers[SOLVER].version == 4
    assert second.outcome is not None
    assert whole.outcome is not None
    assert second.outcome.before == whole.outcome.before
    assert second.outcome.after == whole.outcome.after
    assert [entry.when for entry in second.events.of(Evaluated)] == ["after"]


def test_a_run_that_ends_within_a_step_plays_that_step_again_when_it_is_resumed(tmp_path):
    async def close(run):
        await asyncio.sleep(7.0)  # in the second step
        await run.store.close()

    sections = {"steps": 3, "deterministic": True, "checkpoint": {"every": 1}}
    whole = staggered_run("microbatch", folder=tmp_path / "whole", **sections).play()
    stopped = staggered_run("microbatch", folder=tmp_path / "parts", **sections)
    with pytest.raises(StoreError):
        stopped.play(close)
    assert stopped.events.of(GroupReady)[-1].group >= 4
    resumed = staggered_run("microbatch", folder=tmp_path / "parts", **sections).play()
    assert resumed.events.of(Resumed)[0].step == 1
    assert consumed(resumed) == consumed(whole)[4:]
    assert resumed.trainers[SOLVER].weight == whole.trainers[SOLVER].weight


def test_no_steps_at_all_is_an_evaluation():
    run = ScriptedRun(steps=0, evaluate={"tasks": 3}).play()
    assert [entry.when for entry in run.events.of(Evaluated)] == ["before"]
    assert run.outcome is not None
    assert run.outcome.after == run.outcome.before


async def numbered(task, team):
    """The reward is the number of the task: each step has another mean."""
    reply = await team.solver.act(task.prompt)
    reply.reward(int(task.prompt.split()[1]))


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("tasks", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_line_of_a_step_has_the_figures_of_that_step_whatever_is_evaluated_after_it(steps, tasks, every):
    written = io.StringIO()
    run = ScriptedRun(numbered, steps=steps, evaluate={"tasks": tasks, "every": every})
    run.progress = LineProgress(Console(file=written, width=200))
    run.play()
    lines = [line.split(" | ") for line in written.getvalue().splitlines() if line.startswith("step ")]
    shown = [(line[0], next(part for part in line if part.startswith("reward"))) for line in lines]
    figures = [run.metrics[step]["reward/solver"] for step in range(1, steps + 1)]
    assert len(set(figures)) == len(figures), "else a line could show another step"
    assert shown == [
        (f"step {step}/{steps}", f"reward solver {reward:.2f}") for step, reward in enumerate(figures, start=1)
    ]
