"""From finished groups to READY rows: when, which, and with what divisors."""

import asyncio
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TrainingError
from flexmarl.events.group_events import GroupFiltered, GroupReady, GroupsCredited
from flexmarl.orchestrator.collect import Release
from flexmarl.orchestrator.crediting import MAX_TOGETHER
from flexmarl.records import Divisors, GroupRecord, GroupState, PolicyName
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.orchestrator.groups import SOLVER, Bench, group_of, slowed, turn_of

WHOLE_BATCH = {"estimator": {"type": "default", "singleton": "zero_unless_all"}}


@pytest.mark.parametrize(
    ("release", "credit", "ready_after_each"),
    [
        (Release.AT_ONCE, {}, [[2], [0, 2], [0, 1, 2], [0, 1, 2, 3]]),
        (Release.IN_ORDER, {}, [[], [0], [0, 1, 2], [0, 1, 2, 3]]),
        (Release.AT_END, {}, [[], [], [], []]),
        (Release.AT_ONCE, WHOLE_BATCH, [[], [], [], []]),
    ],
)
def test_groups_become_ready_when_the_release_says_and_all_by_the_end(release, credit, ready_after_each):
    async def scenario():
        bench = Bench(release=release, **credit)
        for group, ready in zip((2, 0, 1, 3), ready_after_each, strict=True):
            await bench.take(group_of(group, [0.0, 1.0]))
            assert await bench.ready_groups() == ready
        divisors = await bench.collector.close()
        assert await bench.ready_groups() == [0, 1, 2, 3]
        assert divisors == {SOLVER: Divisors(num_tokens=16.0, num_sequences=8.0, num_trajectories=8.0)}
        assert set(bench.ready) == {SOLVER}

    run_virtual(scenario())


@given(order=st.permutations(range(5)), delays=st.lists(st.floats(0, 3), min_size=5, max_size=5), data=st.data())
@settings(max_examples=30, deadline=None)
def test_in_order_means_in_order_even_while_the_store_is_slow(order, delays, data):
    slow = data.draw(st.lists(st.floats(0, 2), min_size=1, max_size=10))

    async def scenario():
        bench = Bench(groups=5, release=Release.IN_ORDER)
        settle, waits = bench.store.settle, list(slow)

        async def slowly(ids, outcome):
            await asyncio.sleep(waits.pop() if waits else 0.1)
            await settle(ids, outcome)

        bench.store.settle = slowly

        async def arrive(group, delay):
            await asyncio.sleep(delay)
            await bench.take(group_of(group, [0.0, 1.0]))

        async with asyncio.TaskGroup() as tasks:
            for group, delay in zip(order, delays, strict=True):
                tasks.create_task(arrive(group, delay))
        await bench.collector.close()
        assert [event.group for event in bench.events.of(GroupReady)] == list(range(5))

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("release", "credit", "ready", "judged"),
    [
        (Release.AT_ONCE, {}, [2, 64, 14], [2, 64, 14]),
        (Release.IN_ORDER, {}, [64, 16], [80]),
        (Release.AT_END, {}, [64, 16], [80]),
        (Release.AT_ONCE, WHOLE_BATCH, [64, 16], [80]),
    ],
)
def test_groups_that_come_while_the_store_writes_become_ready_together(release, credit, ready, judged):
    """The judge is frozen, so its rows end FILTERED."""

    async def scenario():
        bench = Bench(groups=40, release=release, **credit)
        groups = [group_of(number, [0.0, 1.0], judged=True) for number in reversed(range(40))]
        for group in groups:
            await bench.play(group)
        written = slowed(bench.store)
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(bench.collector.take(group))
        divisors = await bench.collector.close()
        assert written == {"put": ready, "ready": ready, "filtered": judged}
        assert await bench.ready_groups() == list(range(40))
        assert divisors[SOLVER].num_trajectories == 80

    run_virtual(scenario())


def test_groups_that_fail_or_are_dropped_hold_up_none_of_those_that_came_with_them():
    async def scenario():
        bench = Bench(groups=9, filter={})
        rewards = [[0.0, 1.0], [None, None], [1.0, 1.0]]
        groups = [group_of(number, rewards[number % 3]) for number in range(9)]
        for group in groups:
            await bench.play(group)
        written = slowed(bench.store)
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(bench.collector.take(group))
        assert written == {"put": [2, 4], "ready": [2, 4], "filtered": [2, 2, 2]}
        assert await bench.ready_groups() == [0, 3, 6]
        assert bench.admission.active == (0, 3, 6)

    run_virtual(scenario())


def test_a_failed_group_holds_up_nobody():
    async def scenario():
        bench = Bench(groups=3, release=Release.IN_ORDER)
        await bench.take(group_of(1, [0.0, 1.0]))
        await bench.take(group_of(0, [None, None]))
        assert await bench.ready_groups() == [1]
        assert bench.admission.active == (1, 2)

    run_virtual(scenario())


def test_advantages_compare_the_episodes_of_the_group_and_failed_ones_are_left_out():
    async def scenario():
        bench = Bench(groups=1)
        await bench.take(group_of(0, [0.0, None, 1.0, 1.0]))
        rows = await bench.store.get(await bench.store.claim(SOLVER, 10))
        assert [(row.sample_id, row.values["advantage"]) for row in rows] == [
            ("task-0_0_g0e0a0", pytest.approx(-2 / 3)),
            ("task-0_0_g0e2a0", pytest.approx(1 / 3)),
            ("task-0_0_g0e3a0", pytest.approx(1 / 3)),
        ]
        assert {(row.values["weight"], row.values["episode_tokens"]) for row in rows} == {(1.0, 2.0)}
        assert (await bench.collector.close())[SOLVER].num_trajectories == 3
        (credited,) = bench.events.of(GroupsCredited)
        assert (credited.groups, credited.report["solver"]["group_sizes"]) == ((0,), [3])

    run_virtual(scenario())


def test_a_filtered_group_ends_with_its_rows_and_a_reason_and_counts_in_no_divisor():
    async def scenario():
        bench = Bench(groups=2, filter={})
        await bench.take(group_of(0, [1.0, 1.0]))
        await bench.take(group_of(1, [1.0, 0.0]))
        assert await bench.states() == ["filtered", "filtered", "ready", "ready"]
        (event,) = bench.events.of(GroupFiltered)
        assert (event.group, event.because) == (0, "too_easy: no group's rewards differ: 1 too_easy")
        assert bench.admission.ended == {GroupState.FILTERED: 1}
        assert (await bench.collector.close())[SOLVER] == Divisors(
            num_tokens=4.0, num_sequences=2.0, num_trajectories=2.0
        )
        assert bench.collector.settle_trained(bench.collector.kept) == [1]
        assert bench.admission.active == ()

    run_virtual(scenario())


def test_a_lone_row_without_weight_is_filtered_and_so_is_a_group_of_nothing_else():
    async def scenario():
        bench = Bench(groups=1, estimator={"type": "default", "singleton": "drop"})
        await bench.take(group_of(0, [1.0, None]))
        row, failed = await bench.store.get(["task-0_0_g0e0a0", "task-0_0_g0e1a0"])
        assert (row.state, failed.state) == ("filtered", "open")  # the failed one is the recorder's to end
        assert row.reason == "weight 0: nothing was sampled, or there is nothing to compare with"
        assert bench.events.of(GroupFiltered)[0].because == "no row has weight"
        assert await bench.collector.close() == {SOLVER: Divisors()}
        assert bench.collector.settle_trained(bench.collector.kept) == []
        assert bench.admission.ended == {GroupState.FILTERED: 1}

    run_virtual(scenario())


def test_batch_wide_credit_sees_all_groups_of_the_step_at_once():
    async def scenario(rewards):
        bench = Bench(groups=2, **WHOLE_BATCH)
        for group, of_group in enumerate(rewards):
            await bench.take(group_of(group, of_group))
        await bench.collector.close()
        return [row.values["advantage"] for row in await bench.store.get(await bench.store.claim(SOLVER, 10))]

    assert run_virtual(scenario([[0.25], [0.75]])) == [0.25, 0.75]  # every group is alone: rewards as they are
    assert run_virtual(scenario([[0.25], [0.0, 1.0]])) == [0.0, -0.5, 0.5]


def test_turns_of_a_frozen_policy_are_filtered_and_never_ready():
    async def scenario():
        bench = Bench(groups=1)
        await bench.take(group_of(0, [0.0, 1.0], judged=True))
        assert (await bench.states("solver"), await bench.states("judge")) == (["ready"] * 2, ["filtered"] * 2)
        assert bench.ready == [SOLVER]
        assert set(await bench.collector.close()) == {SOLVER}

    run_virtual(scenario())


def test_a_group_without_a_turn_of_a_trained_policy_is_filtered():
    async def scenario():
        bench = Bench(groups=1)
        await bench.take(group_of(0, []))
        assert bench.admission.ended == {GroupState.FAILED: 1}
        bench = Bench(groups=1)
        group = group_of(0, [0.0, 1.0], judged=True)
        bench.crediting.trained = frozenset({PolicyName("another")})
        await bench.take(group)
        assert bench.events.of(GroupFiltered)[0].because == "no turn of a trained policy"
        assert await bench.states("judge") == await bench.states("solver") == ["filtered"] * 2

    run_virtual(scenario())


def test_empty_responses_have_no_weight():
    async def scenario():
        bench = Bench(groups=1)
        await bench.take(group_of(0, [0.0, 1.0], tokens=0))
        assert await bench.states() == ["filtered", "filtered"]
        assert await bench.collector.close() == {SOLVER: Divisors()}

    run_virtual(scenario())


def test_divisors_count_each_step_anew():
    async def scenario():
        bench = Bench(groups=1)
        await bench.take(group_of(0, [0.0, 1.0]))
        await bench.collector.close()
        bench.collector.settle_trained(bench.collector.kept)
        bench.collector.open()
        bench.admission.admit()
        await bench.take(group_of(1, [0.0, 0.5, 1.0], tokens=5))
        assert (await bench.collector.close())[SOLVER] == Divisors(
            num_tokens=15.0, num_sequences=3.0, num_trajectories=3.0
        )

    run_virtual(scenario())


def test_of_the_groups_that_were_judged_only_the_last_few_are_kept():
    bench, first = Bench(groups=1), 10_000
    for number in range(first, first + 3 * MAX_TOGETHER):
        bench.crediting.judge(group_of(number, [0.0, 1.0]))
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, GroupRecord) and each.group >= first]
    assert 0 < len(kept) <= MAX_TOGETHER


def test_a_token_of_another_version_ends_the_run():
    async def scenario():
        bench = Bench(groups=1)
        group = group_of(0, [0.0, 1.0])
        object.__setattr__(group.episodes[1], "turns", (turn_of(0, 1, 0, version=7),))
        with pytest.raises(TrainingError, match=r"token 0 was sampled by version 7 of .solver., but this step"):
            await bench.take(group)

    run_virtual(scenario())
