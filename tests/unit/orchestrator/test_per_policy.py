"""Policies that update on their own: each at the pace of its own batches; one checkpoint of them all."""

import asyncio

from flexmarl.events.group_events import GroupReady, GroupsCredited
from flexmarl.events.run_events import StepEnded
from flexmarl.events.training_events import Updated
from flexmarl.records import PolicyName, RowState
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER, WRITER = PolicyName("solver"), PolicyName("writer")


async def writer_is_rare(task, team):
    """The solver acts on every task, the writer on every third."""
    number = int(task.prompt.split()[1])
    await asyncio.sleep(0.8)
    (await team.solver.act(task.prompt)).reward(float(number))
    if number % 3 == 0:
        (await team.writer.act(task.prompt)).reward(1.0)


def run_of(workflow=writer_is_rare, **sections):
    """Two groups a step, of two episodes each."""
    pipeline = {"updates": "per_policy", "lag": 3, **sections.pop("pipeline", {})}
    return ScriptedRun(
        workflow,
        mode="async",
        agents={"solver": "solver", "writer": "writer"},
        pipeline=pipeline,
        **{"steps": 4, **sections},
    )


def updates(run, policy):
    return [entry.t for entry in run.events.of(Updated) if entry.policy == policy]


def test_a_rare_policy_waits_for_its_own_batch_and_the_others_do_not():
    run = run_of().play()
    assert run.trainers[SOLVER].version > run.trainers[WRITER].version > 0
    groups = {}
    for batch in run.trainers[WRITER].accumulated:
        version = int(batch.micro_batch_id.split("/")[1])
        groups.setdefault(version, set()).update(sample.turn.sample_id.split("_")[0] for sample in batch.samples)
    assert groups[0] == {"task-0", "task-3"}


def test_a_batch_whose_first_group_has_waited_for_too_long_is_trained_as_it_is():
    async def only_the_first(task, team):
        await asyncio.sleep(0.8)
        (await team.solver.act(task.prompt)).reward(1.0)
        if task.prompt == "task 0":
            (await team.writer.act(task.prompt)).reward(1.0)

    run = run_of(only_the_first, pipeline={"policy_timeout_s": 4.0}, steps=20).play()
    first = min(entry.t for entry in run.events.of(GroupReady) if WRITER in entry.samples)
    assert updates(run, WRITER) == [first + 4.0]
    assert len(updates(run, SOLVER)) >= 20


def test_a_group_ends_as_trained_when_all_its_policies_have_updated_on_it():
    run = run_of(pipeline={"policy_timeout_s": 50.0}).play()
    ended = {group: entry.t for entry in run.events.of(StepEnded) for group in entry.trained}
    assert ended[0] >= updates(run, WRITER)[0]
    assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.EXPIRED}
    trained = {row.sample_id for row in run.rows() if row.state is RowState.TRAINED}
    used = [s.turn.sample_id for trainer in run.trainers.values() for b in trainer.accumulated for s in b.samples]
    assert sorted(used) == sorted(trained)


def test_before_a_checkpoint_every_batch_ends_early_so_that_nothing_is_left_over(tmp_path):
    run = run_of(folder=tmp_path, checkpoint={"every": 1}, pipeline={"policy_timeout_s": 5000.0})
    cached: list[int] = []
    for trainer in run.trainers.values():
        save = trainer.save

        async def look_and_save(path, save=save, trainer=trainer):
            cached.append(len(trainer.cache))
            await save(path)

        trainer.save = look_and_save
    run.play()
    assert cached == [0] * 8
    assert updates(run, WRITER)[0] < 10.0


class SlowToFilter:
    """A store that takes two seconds for the rows that credit leaves out."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def settle(self, ids, outcome):
        if outcome.state is RowState.FILTERED:
            await asyncio.sleep(2.0)
        await self._store.settle(ids, outcome)


def test_a_group_that_is_credited_when_a_step_is_to_end_at_rest_is_trained_in_it(tmp_path):
    async def both(task, team):
        await asyncio.sleep(0.8)
        (await team.solver.act(task.prompt)).reward(1.0)
        (await team.writer.act(task.prompt)).reward(1.0)

    frozen = {"writer": {"trainable": False}}
    run = run_of(both, folder=tmp_path, checkpoint={"every": 1}, policies=frozen)
    run.store = SlowToFilter(run.store)
    run.play()
    credited = set[int]()
    for entry in run.events.all:
        credited.update(entry.groups if isinstance(entry, GroupsCredited) else [])
        credited.difference_update(entry.trained if isinstance(entry, StepEnded) else [])
        assert not (credited and isinstance(entry, StepEnded))
    assert any(len(entry.trained) > 2 for entry in run.events.of(StepEnded)), "none was credited at a step's end"
    assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.FILTERED, RowState.EXPIRED}


def test_staleness_is_that_of_the_moment_in_which_a_batch_is_made():
    run = run_of(steps=6).play()
    oldest = max(run.metrics[step].get("staleness/solver/max", 0.0) for step in run.metrics)
    rows = [row for row in run.rows() if row.state is RowState.TRAINED and row.policy == SOLVER]
    assert oldest == max(row.settled_version - 1 - row.version for row in rows)
