"""A run that is killed at any moment and resumed ends as an undisturbed one: same samples, same weights, same rows.

A moment is whatever a later process could notice: an event in the journal, a call of the store that has been done, a
trainer's part of a checkpoint. The store and the folder of checkpoints outlive a kill; nothing else does.
"""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.events.run_events import StoreRewound
from tests.simulated.conftest import Schedule, check_equal, groups_that_ended, lives, many, schedules, undisturbed

pytestmark = pytest.mark.filterwarnings(
    # Half of a workflow's `gather` may outlive the other half, and then find the pool closed: a real kill takes both.
    "ignore:coroutine .* was never awaited:RuntimeWarning"
)


@pytest.mark.parametrize(("first", "stride"), [(2, 3), pytest.param(1, 1, marks=pytest.mark.deep)])
def test_killed_at_any_single_moment_it_ends_as_if_undisturbed(first: int, stride: int) -> None:
    schedule = Schedule(seed=3, groups=2, micro_batch=2, filtered=True, deterministic=True, raising=0.15)
    sections = {"steps": 2, "evaluate": {"tasks": 1}}
    whole = undisturbed(schedule, **sections)
    assert groups_that_ended([whole]) == [0, 1, 2, 3]
    last_events, went_back_to = Counter[str](), Counter[int]()
    for moment in count(first, stride):
        lived = lives(schedule, [moment], checkpoint={"every": 1}, **sections)
        check_equal(lived, whole, schedule)
        if len(lived) == 1:  # It ended before that moment came.
            break
        last_events.update(event.name for event in lived[0].events.all[-1:])
        went_back_to.update(event.next_group for event in lived[1].events.of(StoreRewound))
    assert set(went_back_to) == {0, 2, 4}
    missing = {"group_admitted", "group_ready", "updated", "published", "step_ended", "checkpoint"} - set(last_events)
    assert not missing, f"no kill came right after {missing}"


def test_killed_again_and_again_it_ends_as_if_undisturbed() -> None:
    seen = Counter[str]()

    @settings(many, max_examples=25)
    @given(
        schedule=schedules,
        kills=st.lists(st.integers(1, 120), min_size=1, max_size=4),
        every=st.integers(1, 2),
    )
    def on_any(schedule: Schedule, kills: list[int], every: int) -> None:
        schedule = replace(schedule, engine_lost_at=None)
        sections = {"steps": 3, "evaluate": {"tasks": 2}}
        lived = lives(schedule, kills, checkpoint={"every": every}, **sections)
        seen["kills"] += len(lived) - 1
        seen["lives"] = max(seen["lives"], len(lived))
        for run in lived:
            seen["discarded"] += sum(event.rows for event in run.events.of(StoreRewound))
            seen["began again"] += sum("begins again" in line for line in run.lines)
            seen.update(event.name for event in run.events.all)
        check_equal(lived, undisturbed(schedule, **sections), schedule)

    on_any()
    assert seen["kills"] > 25
    assert seen["lives"] == 5
    for witness in ("discarded", "began again", "resumed", "group_retried", "group_filtered", "update_skipped"):
        assert seen[witness], f"no example showed: {witness}; {seen}"
