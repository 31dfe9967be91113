"""ReMax: each reward against that of a greedy play."""

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from flexmarl.credit import CreditSettings
from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.baselines import ReMax
from flexmarl.credit.estimators.presets import Default
from flexmarl.credit.filters import Effect
from flexmarl.credit.interface import CreditRow
from flexmarl.records import AgentName
from flexmarl.testing.credit import credit_row


def greedy(reward: float, **fields) -> CreditRow:
    return replace(credit_row(reward, episode=9, **fields), greedy=True)


def test_the_baseline_is_the_reward_of_the_greedy_play() -> None:
    rows = [credit_row(1.0), credit_row(0.0, episode=1), greedy(0.25)]
    credit = ReMax().estimate(rows)
    assert [credit.advantages[row.sample_id] for row in rows] == [0.75, -0.25, 0.0]
    assert [credit.weights[row.sample_id] for row in rows] == [1.0, 1.0, 0.0]


def test_of_several_greedy_turns_it_is_the_mean() -> None:
    rows = [credit_row(1.0), greedy(0.5), greedy(1.0, hop=1)]
    assert ReMax().estimate(rows).advantages[rows[0].sample_id] == 0.25


def test_what_follows_a_token_is_compared_where_rewards_are_on_tokens() -> None:
    row = replace(credit_row(1.0, num_tokens=3), token_rewards=(0.25, 0.25, 0.5))
    credit = ReMax().estimate([row, greedy(0.5)])
    assert credit.token_advantages[row.sample_id] == (0.5, 0.25, 0.0)
    assert credit.advantages[row.sample_id] == 0.25


def test_agents_have_their_own_baselines_or_the_teams() -> None:
    rows = [
        credit_row(1.0),
        credit_row(1.0, hop=1, agent="verifier"),
        greedy(0.0),
        greedy(0.5, hop=1, agent="verifier"),
    ]
    own, teams = ReMax().estimate(rows), ReMax(key=("task",)).estimate(rows)
    assert [own.advantages[row.sample_id] for row in rows[:2]] == [1.0, 0.5]
    assert [teams.advantages[row.sample_id] for row in rows[:2]] == [0.75, 0.75]


def test_an_agent_without_a_turn_in_the_greedy_play_has_weight_0_and_is_counted() -> None:
    rows = [credit_row(1.0), credit_row(1.0, hop=1, agent="router"), greedy(0.0)]
    credit = ReMax().estimate(rows)
    assert [credit.weights[row.sample_id] for row in rows] == [1.0, 0.0, 0.0]
    assert credit.report[AgentName("router")].dropped_singleton == 1
    assert credit.report[AgentName("solver")].dropped_singleton == 0


def test_another_agents_estimator_does_not_see_the_greedy_play() -> None:
    rows = [
        *(credit_row(reward, episode=episode, agent="verifier") for episode, reward in enumerate((1.0, 0.0))),
        greedy(1.0, agent="verifier"),
    ]
    both = CreditSettings(estimator=ReMax(), per_agent={AgentName("verifier"): Default()}).credit(rows)
    assert [both.advantages[row.sample_id] for row in rows] == [0.5, -0.5, 0.0]
    assert [both.weights[row.sample_id] for row in rows] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("filter_on", ["outcome", "final"])
def test_the_filter_does_not_look_at_the_greedy_play(filter_on: str) -> None:
    settings = CreditSettings.model_validate({"estimator": {"type": "remax"}, "filter": {"filter_on": filter_on}})
    (decision,) = settings.decide([credit_row(1.0), credit_row(1.0, episode=1), greedy(0.0)])
    assert decision.effects == {"solver": {Effect.TOO_EASY: 1}}
    assert decision.because == "rewards are equal, from which solver may learn too"


def test_it_is_chosen_by_its_type_and_asks_for_a_greedy_play() -> None:
    chosen = TypeAdapter(AnyEstimator).validate_python({"type": "remax"})
    assert chosen == ReMax()
    assert (chosen.needs, chosen.uses) == ("group", {"greedy"})
