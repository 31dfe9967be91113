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
