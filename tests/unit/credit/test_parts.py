"""What rewards are made of is told apart by agent and by part."""

from dataclasses import replace

import pytest

from flexmarl.credit import CreditSettings
from flexmarl.credit.shaping.shape import reward_parts
from flexmarl.testing.credit import credit_row


def test_the_means_of_an_agents_parts_add_up_to_its_mean_reward():
    settings = CreditSettings.model_validate({"shaping": [{"type": "turn_weighted"}, {"type": "process"}]})
    rows = [
        replace(credit_row(1.5, turn=3, outcome=1.0), parts={"outcome": 1.0, "style": 0.5}),
        replace(credit_row(0.0, hop=1, turn=7), valid=False, signals={"format_error": 1.0}),
        credit_row(1.0, hop=2, agent="judge", turn=7),
    ]
    shaped = settings.shape(rows)
    found = reward_parts(shaped)
    assert dict(found["solver"].means) == {
        "outcome": 0.5,
        "style": 0.25,
        "turn_weighted": -0.25,
        "process": -0.025,
        "invalid_action": -0.05,
    }
    assert found["solver"].turns == 2
    mean = sum(row.reward for row in shaped[:2]) / 2
    assert sum(found["solver"].means.values()) == pytest.approx(mean, rel=1e-12)
    assert found["judge"].means["outcome"] == 1.0


def test_greedy_turns_and_turns_without_a_reward_are_not_counted():
    rows = [credit_row(None), replace(credit_row(1.0, hop=1), greedy=True), credit_row(0.25, hop=2)]
    assert dict(reward_parts(rows)["solver"].means) == {"outcome": 0.25}
