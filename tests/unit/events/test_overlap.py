import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.overlap import intersection, overlap, seconds, union

moments = st.integers(min_value=0, max_value=40)
intervals = st.lists(st.tuples(moments, st.integers(min_value=0, max_value=9)), max_size=8).map(
    lambda spans: [(float(began), float(began + length)) for began, length in spans]
)
trainers = st.dictionaries(st.sampled_from(["trainer/a", "trainer/b", "trainer/c"]), intervals)


def inside(spans, second):
    return any(began <= second and second + 1 <= ended for began, ended in spans)


def test_what_lies_inside_rollout_is_hidden():
    found = overlap({"trainer/solver": [(2.0, 4.0), (5.0, 7.0)]}, [(0.0, 6.0)])
    assert (found.training_s, found.hidden_s, found.hidden) == (4.0, 3.0, 0.75)


def test_two_trainers_at_once_count_twice():
    found = overlap({"trainer/solver": [(0.0, 4.0)], "trainer/verifier": [(0.0, 4.0), (6.0, 8.0)]}, [(0.0, 2.0)])
    assert (found.training_s, found.hidden_s) == (10.0, 4.0)


def test_one_trainer_is_busy_once_however_often_it_says_so():
    assert overlap({"trainer/solver": [(0.0, 4.0), (1.0, 3.0), (0.0, 4.0)]}, [(0.0, 1.0)]).training_s == 4.0


def test_without_training_there_is_no_share():
    assert overlap({}, [(0.0, 1.0)]).hidden is None
    assert overlap({"trainer/solver": [(1.0, 1.0)]}, [(0.0, 1.0)]).hidden is None


def test_after_rollout_nothing_is_hidden():
    assert overlap({"trainer/solver": [(3.0, 4.0)]}, [(0.0, 3.0)]).hidden == 0.0


@given(trainers, intervals)
def test_seconds_are_those_that_one_counts_one_by_one(training, rollout):
    busy = [[s for s in range(50) if inside(union(spans), s)] for spans in training.values()]
    hidden = [[s for s in some if inside(union(rollout), s)] for some in busy]
    found = overlap(training, rollout)
    assert found.training_s == sum(map(len, busy))
    assert found.hidden_s == sum(map(len, hidden))
    assert found.hidden is None or 0 <= found.hidden <= 1


@given(trainers, intervals, intervals)
def test_more_rollout_hides_no_less(training, rollout, more):
    assert overlap(training, rollout).hidden_s <= overlap(training, rollout + more).hidden_s


@given(trainers, intervals, st.randoms())
def test_the_order_of_intervals_makes_no_difference(training, rollout, random):
    shuffled = {name: random.sample(spans, len(spans)) for name, spans in training.items()}
    assert overlap(shuffled, random.sample(rollout, len(rollout))) == overlap(training, rollout)


@given(intervals, intervals)
def test_union_and_intersection_are_disjoint_and_share_out_all_seconds(some, others):
    a, b = union(some), union(others)
    for spans in (a, b, intersection(a, b)):
        assert all(began < ended for began, ended in spans)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert math.isclose(seconds(union(some + others)), seconds(a) + seconds(b) - seconds(intersection(a, b)))


@pytest.mark.parametrize("tiny", [1e-9, 1e-6])
def test_short_work_counts_too(tiny):
    assert overlap({"trainer/solver": [(1.0, 1.0 + tiny)]}, [(0.0, 2.0)]).hidden == 1.0
