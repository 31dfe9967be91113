"""Calls as steps: what followed a call, against what a critic expected before it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.gae import StepGae
from flexmarl.credit.interface import CreditRow
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row


def call(
    hop: int, reward: float, value: float, *, agent: str = "solver", call_reward: float = 0.0, num_tokens: int = 2
) -> CreditRow:
    """Only the first value counts: the others say what a critic knows once the call is under way."""
    row = credit_row(reward, hop=hop, agent=agent, num_tokens=num_tokens)
    return replace(row, values=(value, *[9.0] * (num_tokens - 1)), call_reward=call_reward)


def advantages(estimator: StepGae, rows: list[CreditRow]) -> list[float]:
    found = estimator.estimate(rows).advantages
    return [found[row.sample_id] for row in rows]


def test_a_team_reward_comes_after_the_last_call() -> None:
    rows = [call(0, 1.0, 0.2), call(1, 1.0, 0.5, agent="verifier")]
    credit = StepGae(gamma=0.9, lam=0.8).estimate(rows)
    # Backwards: 1 - .5; then .9 x .5 - .2 + .72 x .5.
    assert [credit.advantages[row.sample_id] for row in rows] == pytest.approx([0.61, 0.5], abs=1e-12)
    assert [credit.returns[row.sample_id] for row in rows] == [
        pytest.approx((0.81, 0.81), abs=1e-12),
        pytest.approx((1.0, 1.0), abs=1e-12),
    ]
    assert not credit.token_advantages


def test_what_a_call_was_given_itself_comes_right_after_it() -> None:
    rows = [call(0, 1.0, 0.2, call_reward=0.25), call(1, 0.75, 0.5)]
    # .75 is the agent's; the first call has .25 of its own: .25 + .9 x .5 - .2 + .72 x .25.
    assert advantages(StepGae(gamma=0.9, lam=0.8), rows) == pytest.approx([0.68, 0.25], abs=1e-12)


def test_the_next_call_is_the_teams_or_the_same_agents() -> None:
    rows = [call(0, 1.0, 0.2), call(1, 1.0, 0.5, agent="verifier"), call(2, 1.0, 0.4)]
    assert advantages(StepGae(gamma=1.0, lam=0.0, scope="team"), rows) == pytest.approx([0.3, -0.1, 0.6], abs=1e-12)
    assert advantages(StepGae(gamma=1.0, lam=0.0, scope="agent"), rows) == pytest.approx([0.2, 0.5, 0.6], abs=1e-12)


def test_agents_with_rewards_of_their_own_each_get_their_own_at_the_end() -> None:
    rows = [call(0, 1.0, 0.0), call(1, -1.0, 0.0, agent="verifier")]
    assert advantages(StepGae(gamma=1.0, lam=1.0), rows) == [1.0, -1.0]


def test_a_call_without_sampled_tokens_is_no_step() -> None:
    empty = replace(credit_row(1.0, hop=1, num_tokens=0), values=())
    rows = [call(0, 1.0, 0.2), empty, call(2, 1.0, 0.5)]
    credit = StepGae(gamma=0.9, lam=0.8).estimate(rows)
    assert credit.advantages[rows[0].sample_id] == pytest.approx(0.61, abs=1e-12)
    assert credit.weights[empty.sample_id] == 0


@given(
    st.lists(st.tuples(*[st.floats(-1, 1)] * 3, st.sampled_from(["solver", "verifier"])), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_it_is_the_sum_of_discounted_differences_of_an_episode(calls, gamma: float, lam: float) -> None:
    shared = calls[0][1]
    rows = [
        call(k, own + shared, value, agent=agent, call_reward=own) for k, (own, _, value, agent) in enumerate(calls)
    ]
    last = len(calls) - 1
    rewards = [own + (shared if k == last else 0.0) for k, (own, *_) in enumerate(calls)]
    values = [value for _, _, value, _ in calls] + [0.0]
    deltas = [rewards[k] + gamma * values[k + 1] - values[k] for k in range(len(calls))]
    expected = [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, last + 1)) for k in range(last + 1)]
    np.testing.assert_allclose(advantages(StepGae(gamma=gamma, lam=lam), rows), expected, rtol=1e-9, atol=1e-12)


def test_without_a_critic_it_says_what_is_missing() -> None:
    with pytest.raises(CreditError, match="has 3 tokens and none values; this estimator compares rewards with those"):
        StepGae().estimate([credit_row(1.0)])


def test_it_is_chosen_by_its_type_and_asks_for_values() -> None:
    chosen = TypeAdapter(AnyEstimator).validate_python({"type": "step_gae", "scope": "agent"})
    assert chosen == StepGae(scope="agent")
    assert (chosen.needs, chosen.uses) == ("group", {"values"})
