"""A run in an asynchronous mode that is killed at any moment goes on: no group and no task is lost, none counts twice.

Other than the synchronous modes it does not end bit for bit as an undisturbed one: what was active at the checkpoint is
played again, with the weights of now.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.events.group_events import GroupExpired
from flexmarl.events.run_events import Resumed, StepEnded, StoreRewound
from flexmarl.records import ROW_TERMINAL, RowState
from flexmarl.testing.faults.story import ended_by, group_of
from flexmarl.testing.scripted_run import ScriptedRun
from tests.simulated.conftest import MODES, Schedule, asynchronous, examples, lives, many, pipelines

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def ended_in(lived: Sequence[ScriptedRun]) -> list[int]:
    """Groups in the order of their ends, without those that a later life plays again."""
    ended: list[int] = []
    for run in lived:
        for event in run.events.of(StoreRewound):
            replay = set(event.replay)
            ended = [group for group in ended if group < event.next_group and group not in replay]
        ended += [group for event in run.events.all for group in ended_by(event)]
    return ended


def trained_in(lived: Sequence[ScriptedRun]) -> dict[int, list[int]]:
    """The groups that each step trained; a later life makes the steps again that were not saved."""
    steps: dict[int, list[int]] = {}
    for run in lived:
        for event in run.events.of(Resumed):
            steps = {step: groups for step, groups in steps.items() if step < event.step}
        steps |= {event.step: event.trained for event in run.events.of(StepEnded)}
    return steps


def check_nothing_lost(lived: Sequence[ScriptedRun], schedule: Schedule, num_steps: int) -> None:
    last = lived[-1]
    ended, trained = ended_in(lived), trained_in(lived)
    assert len(set(ended)) == len(ended)
    if last.outcome is None:  # Too many groups in a row gave nothing.
        return
    assert sorted(ended) == list(range(len(ended)))
    assert {row.state for row in last.rows()} <= ROW_TERMINAL
    assert sorted(trained) == list(range(num_steps))
    assert all(len(groups) >= schedule.groups for groups in trained.values())
    in_store = {group_of(row.sample_id) for row in last.rows() if row.state is RowState.TRAINED}
    assert in_store == {group for groups in trained.values() for group in groups}
    for policy, trainer in last.trainers.items():
        settled = {row.settled_version for row in last.rows() if row.policy == policy and row.settled_version}
        assert settled == set(range(1, trainer.version + 1))


@examples(12, 30)
def test_killed_again_and_again_it_loses_no_group_and_counts_none_twice(num: int) -> None:
    seen = Counter[str]()

    def on_one(schedule: Schedule, mode: str, pipeline: dict, kills: list[int], every: int) -> None:
        schedule = replace(schedule, engine_lost_at=None, mode=mode)
        lived = lives(schedule, kills, checkpoint={"every": every}, steps=3, pipeline=pipeline)
        seen["kills"] += len(lived) - 1
        seen["whole"] += lived[-1].outcome is not None
        for run in lived:
            seen["replayed"] += sum(len(event.replay) for event in run.events.of(StoreRewound))
            seen.update(event.name for event in run.events.all)
        check_nothing_lost(lived, schedule, 3)

    @settings(many, max_examples=num)
    @given(
        schedule=asynchronous,
        mode=st.sampled_from(MODES),
        pipeline=pipelines,
        kills=st.lists(st.integers(1, 200), min_size=1, max_size=3),
        every=st.integers(1, 2),
    )
    def on_any(schedule: Schedule, mode: str, pipeline: dict, kills: list[int], every: int) -> None:
        on_one(schedule, mode, pipeline, kills, every)

    on_one(SLOW, SLOW.mode, {}, [kill_that_replays()], every=1)  # Drawn kills seldom meet a checkpoint like that.
    on_any()
    assert seen["kills"] > num
    for witness in ("whole", "replayed", "resumed", "group_retried", "group_filtered", "group_expired"):
        assert seen[witness], f"no example showed: {witness}; {seen}"


SLOW = Schedule(seed=3, mode="async", groups=2, sample_s=5.0)
"""Training takes so long that groups are active when a step is saved."""


@cache
def kill_that_replays() -> int:
    """A moment at which a kill leaves a checkpoint of SLOW with active groups that had been played."""
    return next(moment for moment in range(60, 400, 10) if replays(SLOW, moment))


def test_a_group_that_was_active_is_played_again_with_the_seeds_that_it_had() -> None:
    first, second = lives(SLOW, [kill_that_replays()], checkpoint={"every": 1}, steps=3)
    replayed = second.events.of(StoreRewound)[0].replay
    seeds = [
        {r.request_id: r.seed for engines in run.engines.values() for engine in engines for r in engine.requests}
        for run in (first, second)
    ]
    both = [name for name in seeds[0].keys() & seeds[1].keys() if group_of(name) in replayed and "_0_g" in name]
    assert both
    assert all(seeds[0][name] == seeds[1][name] for name in both)


def test_groups_that_were_active_at_the_last_checkpoint_end_though_no_step_is_left() -> None:
    for kill in range(226, 300):
        lived = lives(SLOW, [kill], checkpoint={"every": 1}, steps=2)
        if len(lived) == 2 and lived[1].events.of(Resumed)[0].step == 2 and replayed_in(lived[1]):
            break
    else:
        raise AssertionError("no kill came between the last checkpoint and the end")
    assert [event.group for event in lived[1].events.of(GroupExpired)] == replayed_in(lived[1])
    check_nothing_lost(lived, SLOW, 2)


def replayed_in(run: ScriptedRun) -> list[int]:
    """The groups that were active at the checkpoint from which the run goes on."""
    return [group for event in run.events.of(StoreRewound) for group in event.replay]


def replays(schedule: Schedule, kill: int) -> bool:
    """Whether a kill at this moment leaves a checkpoint with active groups that had been played."""
    lived = lives(schedule, [kill], checkpoint={"every": 1}, steps=3)
    return len(lived) == 2 and any(event.replay for event in lived[1].events.of(StoreRewound))
