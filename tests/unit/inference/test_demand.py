"""What to expect of requests, from those that were answered."""

import pytest

from flexmarl.inference.scaling import Demand, Expectation
from flexmarl.records import PolicyName

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")


def test_nothing_is_expected_of_a_policy_that_has_answered_nothing() -> None:
    demand = Demand()
    demand.answered(SOLVER, tokens=0, serving_s=1.0)
    assert demand.expected(SOLVER) is None
    assert demand.work == {}


def test_a_request_that_runs_has_more_left_than_half_the_mean_because_long_ones_run_longer() -> None:
    demand = Demand()
    demand.answered(SOLVER, tokens=100, serving_s=10.0)
    demand.answered(SOLVER, tokens=300, serving_s=30.0)
    # Met at a random moment it is the long one three times out of four, and half of it is left: 3/4 150 + 1/4 50.
    assert demand.expected(SOLVER) == Expectation(tokens=200.0, tokens_left=125.0, tokens_per_s=10.0)


def test_the_work_of_a_step_is_an_average_over_the_last_ones_where_older_ones_fade() -> None:
    demand = Demand()
    for seconds in (10.0, 10.0, 10.0):
        demand.answered(SOLVER, tokens=1, serving_s=seconds)
        demand.answered(JUDGE, tokens=1, serving_s=5.0)
        demand.step_ended()
    assert demand.work == pytest.approx({SOLVER: 10.0, JUDGE: 5.0})
    demand.answered(SOLVER, tokens=1, serving_s=30.0)
    demand.step_ended()
    assert 10.0 < demand.work[SOLVER] < 20.0, "not by one step"
    assert demand.work[JUDGE] < 5.0, "a step without a request counts too"


def test_a_policy_that_has_answered_nothing_is_expected_to_be_like_the_others() -> None:
    demand = Demand()
    demand.answered(SOLVER, tokens=100, serving_s=10.0)
    assert demand.expected(JUDGE) == demand.expected(SOLVER)


def test_requests_that_still_run_make_lengths_longer_because_short_ones_are_answered_first() -> None:
    demand = Demand()
    demand.answered(SOLVER, tokens=100, serving_s=10.0)
    demand.answered(SOLVER, tokens=100, serving_s=10.0)
    # 60 s of serving for two answers, at 10 tokens a second: the mean of an exponential distribution.
    expected = demand.expected(SOLVER, {SOLVER: 40.0, JUDGE: 900.0})
    assert expected == Expectation(tokens=300.0, tokens_left=150.0, tokens_per_s=10.0)


def test_before_the_first_answer_a_request_is_expected_to_take_as_long_as_all_have_run() -> None:
    expected = Demand().expected(SOLVER, {SOLVER: 8.0, JUDGE: 2.0})
    assert expected is not None
    assert expected.tokens / expected.tokens_per_s == expected.tokens_left / expected.tokens_per_s == 10.0
    assert Demand().expected(SOLVER, {SOLVER: 0.0}) is None
