"""Invalid actions: law F4, and what division by the standard deviation makes of a small penalty."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.credit import CreditSettings
from flexmarl.credit.estimators.presets import Default, DrMas
from flexmarl.credit.filters import OutcomeFilter
from flexmarl.credit.shaping.shape import InvalidAction
from flexmarl.records import AgentName
from flexmarl.testing.credit import credit_row

SOLVER = AgentName("solver")


def group(*rewards, invalid=()):
    return [
        replace(credit_row(reward, episode=episode), valid=episode not in invalid)
        for episode, reward in enumerate(rewards)
    ]


def test_the_penalty_is_a_part_of_the_reward_of_the_call_and_none_of_its_outcome():
    right, wrong = InvalidAction().penalise(group(1.0, 1.0, invalid=[1]))
    assert (right.reward, right.outcome, dict(right.parts)) == (1.0, 1.0, {"outcome": 1.0, "invalid_action": 0.0})
    assert (wrong.reward, wrong.outcome, wrong.call_reward) == (0.9, 1.0, -0.1)
    assert dict(wrong.parts) == {"outcome": 1.0, "invalid_action": -0.1}


def test_a_row_without_a_reward_has_none_after_the_penalty():
    (row,) = InvalidAction().penalise([replace(credit_row(None), valid=False)])
    assert row.reward is None


@given(
    rewards=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    invalid=st.sets(st.integers(0, 5)),
    penalty=st.floats(0, 0.5),
)
def test_f4_with_centring_alone_no_advantage_changes_by_more_than_the_penalty(rewards, invalid, penalty):
    rows = group(*rewards, invalid=invalid)
    without = Default().estimate(rows).advantages
    given = Default().estimate(InvalidAction(penalty=penalty).penalise(rows)).advantages
    assert max(abs(given[name] - without[name]) for name in given) <= penalty + 1e-12


def test_divided_by_the_standard_deviation_a_small_penalty_is_all_there_is():
    penalised = InvalidAction(penalty=0.1).penalise(group(1.0, 1.0, 1.0, 1.0, invalid=[1]))
    scaled = [*DrMas().estimate(penalised).advantages.values()]
    assert scaled == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-4)
    credit = DrMas(std_floor=0.1).estimate(penalised)
    assert [*credit.advantages.values()] == pytest.approx([0.25, -0.75, 0.25, 0.25], abs=1e-4), "std .05, floor .1"
    assert credit.report[SOLVER].penalty_alone == 1, "such groups are counted"


def test_a_group_whose_outcomes_differ_is_not_counted_as_one_of_penalties():
    penalised = InvalidAction().penalise(group(1.0, 0.0, invalid=[1]))
    assert Default().estimate(penalised).report[SOLVER].penalty_alone == 0


def test_f2_a_task_that_all_solved_is_dropped_whatever_the_penalties():
    penalised = InvalidAction().penalise(group(1.0, 1.0, invalid=[1]))
    (on_outcome,) = OutcomeFilter().decide(penalised)
    (on_final,) = OutcomeFilter(filter_on="final").decide(penalised)
    assert (on_outcome.kept, on_outcome.reason, on_final.kept) == (False, "too_easy", True)


def test_after_the_comparison_the_penalty_comes_off_the_advantage_unscaled():
    rows = group(1.0, 0.0, invalid=[0])
    penalty = InvalidAction(penalty=0.25, order="after")
    assert penalty.penalise(rows) is rows
    credit = Default().estimate(rows)
    token = replace(credit, token_advantages={rows[0].sample_id: (0.5, 1.0)})
    lowered = penalty.lower(token, rows)
    assert [*lowered.advantages.values()] == [0.25, -0.5]
    assert lowered.token_advantages == {rows[0].sample_id: (0.25, 0.75)}
    assert InvalidAction(order="before").lower(credit, rows) is credit


def test_a_row_without_weight_has_no_penalty_after_the_comparison():
    rows = [replace(credit_row(1.0, num_tokens=0), valid=False)]
    assert [*InvalidAction(order="after").lower(Default().estimate(rows), rows).advantages.values()] == [0.0]


@pytest.mark.parametrize("chosen", [{"estimator": {"type": "max_rl"}}, {"per_agent": {"solver": {"type": "max_rl"}}}])
def test_no_penalty_makes_a_reward_negative_whose_group_divides_by_its_mean(chosen):
    with pytest.raises(ValidationError, match=r"divides by the mean reward.*use invalid_action\.order=after"):
        CreditSettings.model_validate(chosen)
    rows = [replace(credit_row(reward, episode=i), valid=bool(i)) for i, reward in enumerate((0.0, 0.0, 1.0))]
    for invalid_action in ({"order": "after"}, {"penalty": 0}, None):
        settings = CreditSettings.model_validate({**chosen, "invalid_action": invalid_action})
        assert settings.credit(settings.shape(rows)).weights
