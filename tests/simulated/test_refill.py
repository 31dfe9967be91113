"""Dynamic sampling with refill, through the whole pipeline in virtual time (laws F1 to F3)."""

import asyncio
from contextlib import suppress
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.errors import EpisodeError
from flexmarl.events.group_events import GroupAdmitted, GroupFiltered, Refilled
from flexmarl.events.run_events import StepEnded
from flexmarl.records import PolicyName, RowState
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER = PolicyName("solver")
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def refilled(dull, *, mode="microbatch", groups=2, steps=2, delays=0, failing=(), **sections) -> ScriptedRun:
    """Tasks in `dull` give everybody 1, those in `failing` raise; `delays` is the seed of how long episodes take."""

    async def workflow(task, team) -> None:
        number = int(task.prompt.split()[-1])
        reply = await team.solver.act(task.prompt)
        episode = reply.turns[0].episode
        await asyncio.sleep(Random(f"{delays}/{episode}").random() * 9 if delays else 0.0)
        if number in failing:
            raise ValueError("the workflow raised")
        reply.reward(1.0 if number in dull else float(episode.endswith("e1a0")))

    credit = sections.pop("credit", {})
    kept = {"refill": True, "max_gen_batches": 3, **credit}
    batch = {"groups": groups, "episodes": 2}
    return ScriptedRun(workflow, mode=mode, steps=steps, batch=batch, credit={"filter": kept}, **sections)


def trained(run) -> list[list[int]]:
    return [sorted(event.trained) for event in run.events.of(StepEnded)]


@pytest.mark.parametrize("mode", ["sync", "microbatch", "colocated"])
def test_a_dropped_group_is_replaced_in_its_own_step(mode):
    run = refilled({0, 3, 4}, mode=mode).play()
    assert trained(run) == [[1, 2], [5, 6]]
    assert [(event.group, event.step) for event in run.events.of(GroupAdmitted)] == [
        *((group, 0) for group in range(3)),
        *((group, 1) for group in range(3, 7)),
    ]
    assert [(e.generated, e.kept, e.because) for e in run.events.of(Refilled)] == [
        (3, 2, "2 groups are kept"),
        (4, 2, "2 groups are kept"),
    ]
    assert (run.metrics[1]["refill/generated"], run.metrics[1]["refill/dropped"]) == (3, 1)
    assert (run.metrics[1]["filter/solver/too_easy"], run.metrics[1]["filter/solver/effective"]) == (1, 2)
    assert {row.state for row in run.rows()} == {RowState.TRAINED, RowState.FILTERED}


@given(
    dull=st.sets(st.integers(0, 30)),
    failing=st.sets(st.integers(0, 30), max_size=4),
    mode=st.sampled_from(["sync", "microbatch", "colocated"]),
    deterministic=st.booleans(),
    ahead=st.booleans(),
    groups=st.integers(1, 3),
    on_shortfall=st.sampled_from(["train_short", "unfiltered"]),
    inter_query=st.integers(1, 4),
    delays=st.tuples(st.integers(1, 99), st.integers(1, 99)),
)
@few
def test_what_a_step_trains_on_depends_on_no_order_of_finishing(
    dull, failing, mode, deterministic, ahead, groups, on_shortfall, inter_query, delays
):
    def ended(seed):
        run = refilled(
            dull,
            failing=failing - {0},
            mode=mode,
            groups=groups,
            delays=seed,
            deterministic=deterministic,
            credit={"on_shortfall": on_shortfall},
            rollout={"inter_query": inter_query},
            pipeline={"ahead": ahead and mode != "colocated"},
        )
        with suppress(EpisodeError):  # Of a step in which all groups failed.
            run.play()
        rows = [(row.sample_id, row.state, row.values.get("advantage")) for row in run.rows()]
        return trained(run), rows, run.trainers[SOLVER].weight

    (first, rows, weight), (second, same_rows, same_weight) = map(ended, delays)
    assert first == second
    assert rows == same_rows
    assert weight == pytest.approx(same_weight, rel=1e-12, abs=1e-15)
    effective = [group for group in range(300) if group not in dull and group not in failing - {0}]
    if on_shortfall == "train_short":
        assert {group for step in first for group in step} <= set(effective), "law F1"


@pytest.mark.parametrize("mode", ["sync", "microbatch", "colocated"])
@pytest.mark.parametrize("on_shortfall", ["train_short", "unfiltered", "error"])
def test_when_everything_is_filtered_a_step_still_ends_after_so_many_batches(mode, on_shortfall):
    run = refilled(set(range(100)), mode=mode, credit={"on_shortfall": on_shortfall})
    if on_shortfall == "error":
        with pytest.raises(
            EpisodeError, match=r"of 2 groups cannot be filled: 5 of 6 .* too_easy: .*max_gen_batches=3"
        ):
            run.play()
        return
    run.play()
    kept = [[], []] if on_shortfall == "train_short" else [[4, 5], [10, 11]]
    assert trained(run) == kept
    assert [event.generated for event in run.events.of(Refilled)] == [6, 6]
    assert len(run.events.of(GroupFiltered)) == 12 - 2 * len(kept[0])
    assert run.trainers[SOLVER].version == (2 if kept[0] else 0)
    assert run.trainers[SOLVER].weight == 0.0


def test_groups_that_fail_are_replaced_too_and_never_kept():
    assert trained(refilled({1}, failing={0, 2}, steps=1, credit={"on_shortfall": "unfiltered"}).play()) == [[3, 4]]
    run = refilled(set(range(1, 9)), failing={0, 4}, steps=1, credit={"on_shortfall": "unfiltered"}).play()
    assert trained(run) == [[5]]
    with pytest.raises(EpisodeError, match="step 1: none of its 6 groups had a finished episode"):
        refilled(set(), failing=set(range(9))).play()


def test_a_source_that_ends_while_a_step_is_refilled_makes_it_short_and_only_the_next_one_has_no_tasks():
    run = refilled({0, 1}, num_tasks=3)
    with pytest.raises(SourceExhausted, match="no training task at position 3 of 3"):
        run.play()
    assert trained(run) == [[2]]
    (event,) = run.events.of(Refilled)
    assert (event.generated, event.kept) == (3, 1)
    assert event.because == "1 of 2 groups are kept: tasks: there is no training task at position 3 of 3"


def test_a_solved_task_with_one_penalty_is_dropped_on_its_outcome_and_kept_on_its_final_rewards():
    async def all_solve_and_one_is_fined(task, team) -> None:
        reply = await team.solver.act(task.prompt)
        fined = reply.turns[0].episode.endswith("e1a0")
        reply.reward(1.0)
        reply.reward(-0.1 * fined, part="penalty")

    def kept(filter_on):
        credit = {"filter": {"filter_on": filter_on}}
        return trained(ScriptedRun(all_solve_and_one_is_fined, credit=credit, steps=1).play())

    assert kept("outcome") == [[]]
    assert kept("final") == [[0, 1]]
