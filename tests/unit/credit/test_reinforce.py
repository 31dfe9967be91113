"""REINFORCE: the advantage is the reward."""

from pydantic import TypeAdapter

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.baselines import Reinforce
from flexmarl.records import AgentName
from flexmarl.testing.credit import check_estimator, credit_row, random_credit_rows


def test_the_advantage_is_the_reward_whatever_the_others_got() -> None:
    rows = [credit_row(reward, episode=episode) for episode, reward in enumerate((1.0, -0.5, 0.0))]
    credit = Reinforce().estimate(rows)
    assert list(credit.advantages.values()) == [1.0, -0.5, 0.0]
    assert set(credit.weights.values()) == {1.0}


def test_a_row_is_estimated_alone_as_it_is_among_others() -> None:
    rows = random_credit_rows(3)
    together = Reinforce().estimate(rows)
    for row in rows:
        alone = Reinforce().estimate([row])
        assert alone.advantages[row.sample_id] == together.advantages[row.sample_id]
        assert alone.weights[row.sample_id] == together.weights[row.sample_id]


def test_a_row_without_sampled_tokens_is_counted_and_weighs_nothing() -> None:
    row = credit_row(1.0, num_tokens=0)
    credit = Reinforce().estimate([row])
    assert (credit.advantages[row.sample_id], credit.weights[row.sample_id]) == (0.0, 0.0)
    assert credit.report[AgentName("solver")].empty == 1


def test_it_passes_the_conformance_check_and_is_chosen_by_its_type() -> None:
    check_estimator(Reinforce())
    assert TypeAdapter(AnyEstimator).validate_python({"type": "reinforce"}) == Reinforce()
    assert Reinforce().needs == "row"
