"""Streaming credit through the whole pipeline in virtual time: the same updates as group credit, earlier."""

import asyncio
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.events.group_events import GroupFiltered, GroupReady
from flexmarl.events.run_events import StepEnded
from flexmarl.events.training_events import MicroBatchDone, UpdateSkipped
from flexmarl.experience.ledger import claim_order
from flexmarl.records import PolicyName, RowState, split_trajectory_id
from flexmarl.testing.faults.faulty import SlowStore
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER = PolicyName("solver")
some = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ESTIMATORS = [
    {"type": "default"},
    {"type": "default", "singleton": "drop"},
    {"type": "default", "singleton": "raw"},
    {"type": "drmas"},
    {"type": "grpo"},
    {"type": "grpo_trajectory"},
    {"type": "rloo"},
]


class NotedStore(SlowStore):
    """A slow store that notes of how many episodes the rows are that become READY together."""

    def __init__(self, inner, *, longest_s, random):
        super().__init__(inner, longest_s=longest_s, random=random)
        self.together = []

    async def call(self, name, do):
        if name == "settle" and do.args[1].state is RowState.READY:
            self.together.append(len({claim_order(sample_id)[:2] for sample_id in do.args[0]}))
        return await super().call(name, do)


def played(
    streaming,
    *,
    seed=0,
    slow=9.0,
    sample_s=0.3,
    micro_batch=2,
    agents=None,
    failing=0.0,
    alone=0.0,
    store_s=0.0,
    **sections,
):
    """Two agents, episodes of any length; some fail, and in some the verifier says nothing."""

    async def workflow(task, team) -> None:
        reply = await team.solver.act(task.prompt)
        random = Random(f"{seed}/{reply.turns[0].episode}")
        await asyncio.sleep(slow * random.random())
        if random.random() < failing:
            raise ValueError("the workflow raised")
        reply.reward(float(random.randrange(2)))
        if random.random() >= alone:
            (await team.verifier.act(reply.text)).reward(random.randrange(3) / 2)

    agents = agents or {"solver": "solver", "verifier": "verifier"}
    credit = {"streaming": streaming, **sections.pop("credit", {})}
    policies = {name: {"training": {"micro_batch": micro_batch}} for name in agents.values()}
    sections = {"steps": 2, "batch": {"groups": 3, "episodes": 3}, **sections}
    run = ScriptedRun(
        workflow, agents=agents, seconds_per_sample=sample_s, policies=policies, credit=credit, **sections
    )
    run.store = NotedStore(run.store, longest_s=store_s, random=Random(seed))
    return run.play()


def outcome(run):
    rows = [(row.sample_id, row.state, row.settled_version, row.values.get("advantage")) for row in run.rows()]
    return rows, [sorted(event.trained) for event in run.events.of(StepEnded)]


@given(
    seed=st.integers(0, 10_000),
    estimator=st.sampled_from(ESTIMATORS),
    filtered=st.sampled_from([None, {}, {"refill": True, "max_gen_batches": 2}]),
    shared=st.booleans(),
    micro_batch=st.integers(1, 4),
    sample_s=st.sampled_from([0.0, 0.3, 3.0]),
    failing=st.sampled_from([0.0, 0.3]),
    alone=st.sampled_from([0.0, 0.4, 0.8]),
    ahead=st.booleans(),
)
@some
def test_streaming_credit_gives_the_updates_and_the_rows_that_group_credit_gives(
    seed, estimator, filtered, shared, micro_batch, sample_s, failing, alone, ahead
):
    agents = {"solver": "solver", "verifier": "solver" if shared else "verifier"}

    def run(streaming):
        return played(
            streaming,
            seed=seed,
            agents=agents,
            micro_batch=micro_batch,
            sample_s=sample_s,
            failing=failing,
            alone=alone,
            credit={"estimator": estimator, "filter": filtered},
            pipeline={"ahead": ahead},
        )

    streamed, whole = run("linear"), run("off")
    rows, trained = outcome(streamed)
    assert trained == outcome(whole)[1]
    assert rows == outcome(whole)[0]
    assert {row.state for row in streamed.rows()} <= {RowState.TRAINED, RowState.FILTERED, RowState.FAILED}
    for policy, trainer in streamed.trainers.items():
        assert trainer.version == whole.trainers[policy].version
        assert trainer.weight == pytest.approx(whole.trainers[policy].weight, rel=1e-10, abs=1e-12)


def test_episodes_that_end_while_the_store_writes_become_ready_together_and_give_the_same_update():
    together = list[int]()
    for seed in range(6):
        sections = {"seed": seed, "batch": {"groups": 3, "episodes": 4}, "credit": {"filter": {}}}
        streamed, whole = played("linear", store_s=6.0, **sections), played("off", **sections)
        assert outcome(streamed) == outcome(whole)
        for policy, trainer in streamed.trainers.items():
            assert trainer.weight == pytest.approx(whole.trainers[policy].weight, rel=1e-10, abs=1e-12)
        together += streamed.store.together
    assert {1, 2, 4} < set(together)


def test_rows_train_while_their_group_still_plays():
    def first_trained(streaming):
        run = played(streaming, slow=20.0, micro_batch=1, steps=1, credit={"filter": {}})
        return min(event.began for event in run.events.of(MicroBatchDone)), run.events.of(GroupReady)[0].t

    began, first_group = first_trained("linear")
    assert began < first_group
    began, first_group = first_trained("off")
    assert began >= first_group


def test_groups_that_are_dropped_while_they_are_trained_leave_nothing_behind():
    run = played("linear", credit={"filter": {}}, micro_batch=1, seed=5, batch={"groups": 4, "episodes": 2})
    dropped = {event.group for event in run.events.of(GroupFiltered)}
    sampled = [row for row in run.rows() if int(row.sample_id.split("_g")[1].split("e")[0]) in dropped]
    assert dropped, "no group was filtered"
    assert {(row.state, row.cache) for row in sampled} == {(RowState.FILTERED, None)}
    assert all("advantage" not in row.values for row in sampled)
    assert any("score" in row.values for row in sampled)
    accumulated = {s.turn.sample_id for batch in run.trainers[SOLVER].accumulated for s in batch.samples}
    assert accumulated & {row.sample_id for row in sampled}, "none of them was trained before it was dropped"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_all_of_whose_groups_are_dropped_takes_no_row_of_the_next_step_for_its_own(resumed, tmp_path):
    async def workflow(task, team) -> None:
        reply = await team.solver.act(task.prompt)
        group, index, _ = split_trajectory_id(reply.turns[0].episode)
        await asyncio.sleep(group + index)
        learns = task.input_id in ("task-2", "task-3")
        reply.reward(float(learns and split_trajectory_id(reply.turns[0].episode)[1] == 0))

    def run(steps):
        return ScriptedRun(
            workflow,
            credit={"streaming": "linear"},
            policies={"solver": {"training": {"micro_batch": 1}}},
            steps=steps,
            batch={"groups": 2, "episodes": 3},
            checkpoint={"every": 1},
            folder=tmp_path,
        ).play()

    played = run(1 if resumed else 2)
    assert len(played.events.of(UpdateSkipped)) == 1
    assert [event.micro_batch for event in played.events.of(MicroBatchDone)][:6] == [f"solver/0/{i}" for i in range(6)]
    if resumed:
        played = run(2)
    assert played.trainers[SOLVER].version == 1
    assert played.events.of(StepEnded)[-1].trained == (2, 3)
