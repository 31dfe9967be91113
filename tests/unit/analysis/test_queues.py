"""Queues that nobody looked at, from the calls that waited in them."""

from flexmarl.analysis.queues import MOST_COUNTS, queue_counts_of
from flexmarl.events.serving_events import Called
from tests.calls import a_call


def call(began: float, ended: float, *, waited: float = 0.0, instance: str = "a/0") -> Called:
    return a_call(instance, began=began, ended=ended, waited_s=waited)


def test_a_call_waits_in_the_pool_until_an_instance_has_it() -> None:
    found = queue_counts_of([call(3.0, 5.0, waited=2.0)], {"a": 4})
    assert [(counts.t, counts.queued["a"], counts.running["a"]) for counts in found] == [
        (1.0, 1, 0),
        (3.0, 0, 1),
        (5.0, 0, 0),
    ]


def test_calls_beyond_the_slots_of_their_instance_wait_there() -> None:
    found = queue_counts_of([call(0.0, 2.0), call(0.0, 4.0), call(1.0, 6.0)], {"a": 1})
    assert [(counts.t, counts.queued["a"]) for counts in found] == [(0.0, 1), (1.0, 2), (2.0, 1), (4.0, 0), (6.0, 0)]


def test_policies_and_instances_have_queues_of_their_own() -> None:
    found = queue_counts_of(
        [call(0.0, 2.0), call(0.0, 2.0, instance="a/1"), call(0.0, 2.0, instance="b/0")], {"a": 1, "b": 1}
    )
    assert [dict(counts.queued) for counts in found] == [{"a": 0, "b": 0}] * 2
    assert found[0].running == {"a": 2, "b": 1}


def test_there_are_no_more_looks_than_a_picture_shows() -> None:
    many = [call(float(number), number + 1.5) for number in range(2 * MOST_COUNTS)]
    assert 0 < len(queue_counts_of(many, {"a": 1})) <= MOST_COUNTS + 2


def test_no_calls_have_no_queues() -> None:
    assert queue_counts_of([], {"a": 1}) == []
