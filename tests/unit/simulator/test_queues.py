"""Queues that nobody looked at, from the calls that waited in them."""

from flexmarl.analysis.queues import LOOKS, looks_of
from flexmarl.events.serving_events import Called
from flexmarl.testing.events import a_call


def call(began: float, ended: float, *, waited: float = 0.0, instance: str = "a/0") -> Called:
    return a_call(instance, began=began, ended=ended, waited_s=waited)


def test_a_call_waits_in_the_pool_until_an_instance_has_it() -> None:
    looks = looks_of([call(3.0, 5.0, waited=2.0)], {"a": 4})
    assert [(look.t, look.queued["a"], look.running["a"]) for look in looks] == [(1.0, 1, 0), (3.0, 0, 1), (5.0, 0, 0)]


def test_calls_beyond_the_slots_of_their_instance_wait_there() -> None:
    looks = looks_of([call(0.0, 2.0), call(0.0, 4.0), call(1.0, 6.0)], {"a": 1})
    assert [(look.t, look.queued["a"]) for look in looks] == [(0.0, 1), (1.0, 2), (2.0, 1), (4.0, 0), (6.0, 0)]


def test_policies_and_instances_have_queues_of_their_own() -> None:
    looks = looks_of([call(0.0, 2.0), call(0.0, 2.0, instance="a/1"), call(0.0, 2.0, instance="b/0")], {"a": 1, "b": 1})
    assert [dict(look.queued) for look in looks] == [{"a": 0, "b": 0}] * 2
    assert looks[0].running == {"a": 2, "b": 1}


def test_there_are_no_more_looks_than_a_picture_shows() -> None:
    many = [call(float(number), number + 1.5) for number in range(2 * LOOKS)]
    assert 0 < len(looks_of(many, {"a": 1})) <= LOOKS + 2


def test_no_calls_have_no_queues() -> None:
    assert looks_of([], {"a": 1}) == []
