"""Tasks become groups, in order, as long as there are slots and tasks."""

import pytest

from flexmarl.errors import TransitionError
from flexmarl.events.group_events import GroupAdmitted
from flexmarl.events.journal import RememberedEvents
from flexmarl.orchestrator.feed import Feed, Refill
from flexmarl.records import GroupState
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.scripted_run import CountedTasks


def feed_of(*, groups=3, num_tasks=None, next_group=0):
    admission, events = Admission(AdmissionLaw(groups=groups, lag=0, window=1), next_group), RememberedEvents()
    return Feed(source=CountedTasks(num_tasks), admission=admission, groups=groups, events=events), admission, events


async def drawn(feed, step):
    return [
        (group.group, group.task.input_id, group.step)
        async for group in feed.groups(step, Refill(feed.num_groups, None))
    ]


def test_the_position_in_the_source_is_the_id_of_the_group():
    feed, admission, events = feed_of(next_group=40)
    assert run_virtual(drawn(feed, 7)) == [(40, "task-40", 7), (41, "task-41", 7), (42, "task-42", 7)]
    assert admission.active == (40, 41, 42)
    assert [event.because for event in events.of(GroupAdmitted)] == [
        f"{active} of 3 slots are active" for active in range(3)
    ]


def test_groups_are_admitted_one_by_one_as_they_are_asked_for():
    async def scenario():
        feed, admission, _ = feed_of()
        groups = feed.groups(0, Refill(3, None))
        assert admission.active == ()
        await anext(groups)
        assert admission.active == (0,)
        await groups.aclose()

    run_virtual(scenario())


def test_the_groups_of_a_step_must_end_before_the_next_one():
    feed, admission, _ = feed_of()
    run_virtual(drawn(feed, 0))
    with pytest.raises(TransitionError, match="group 3 may not be admitted: all 3 slots are active"):
        run_virtual(drawn(feed, 1))
    for group in admission.active:
        admission.move(group, GroupState.RUNNING)
        admission.move(group, GroupState.FAILED)
    assert [group for group, _, _ in run_virtual(drawn(feed, 1))] == [3, 4, 5]


def test_a_source_that_ends_says_where_and_admits_nothing():
    feed, admission, _ = feed_of(num_tasks=2)
    with pytest.raises(SourceExhausted, match="no training task at position 2 of 2"):
        run_virtual(drawn(feed, 0))
    assert admission.active == (0, 1)
