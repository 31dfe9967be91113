"""Returns and generalised advantages, with holes in masks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.credit.returns import discounted_returns, generalised_advantages, token_rewards, token_values
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row

MASK = (1, 1, 0, 0, 1, 1)
REWARDS = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
VALUES = (0.2, 0.3, 9.0, 9.0, 0.5, 0.6)

numbers = st.floats(-2, 2, allow_subnormal=False)
fractions = st.floats(0, 1)
rows = st.lists(st.tuples(st.booleans(), numbers, numbers), min_size=1, max_size=12).map(
    lambda steps: (
        np.array([float(sampled) for sampled, _, _ in steps]),
        np.array([reward if sampled else 0.0 for sampled, reward, _ in steps]),
        np.array([value for _, _, value in steps]),
    )
)


def going_backwards(mask, rewards, values, *, gamma, lam):
    """The published form: masked steps hand on what stands behind them."""
    next_value = last = 0.0
    advantages = np.zeros(len(mask))
    for t in reversed(range(len(mask))):
        new = rewards[t] + gamma * next_value - values[t] + gamma * lam * last
        if mask[t]:
            next_value, last = values[t], new
        advantages[t] = last
    return advantages


def test_discounted_returns_carry_over_masked_tokens() -> None:
    returns = discounted_returns(REWARDS, gamma=0.9, mask=MASK)
    np.testing.assert_allclose(returns, [0.729, 0.81, 0, 0, 0.9, 1], rtol=0, atol=1e-12)


def test_advantages_skip_masked_tokens() -> None:
    advantages = generalised_advantages(REWARDS, VALUES, gamma=0.9, lam=0.8, mask=MASK)
    np.testing.assert_allclose(advantages, [0.348035, 0.386160, 0, 0, 0.328, 0.4], rtol=0, atol=5e-7)
    returns = advantages + np.array(VALUES)
    np.testing.assert_allclose(returns[np.array(MASK) == 1], [0.548035, 0.686160, 0.828, 1], rtol=0, atol=5e-7)


@given(rows, fractions, fractions)
def test_advantages_equal_the_published_recursion(row, gamma: float, lam: float) -> None:
    mask, rewards, values = row
    ours = generalised_advantages(rewards, values, gamma=gamma, lam=lam, mask=mask)
    published = going_backwards(mask, rewards, values, gamma=gamma, lam=lam)
    np.testing.assert_allclose(ours, published * mask, rtol=1e-12, atol=1e-12)


@given(rows, fractions)
def test_lam_0_gives_the_temporal_difference(row, gamma: float) -> None:
    _, rewards, values = row
    advantages = generalised_advantages(rewards, values, gamma=gamma, lam=0.0)
    np.testing.assert_allclose(advantages, rewards + gamma * np.append(values[1:], 0) - values, atol=1e-12)


@given(rows)
def test_lam_1_and_gamma_1_give_what_follows_minus_what_was_expected(row) -> None:
    mask, rewards, values = row
    advantages = generalised_advantages(rewards, values, gamma=1.0, lam=1.0, mask=mask)
    followed = discounted_returns(rewards, gamma=1.0, mask=mask)
    np.testing.assert_allclose(advantages, (followed - values) * mask, atol=1e-12)
    np.testing.assert_allclose(followed, np.cumsum(rewards[::-1])[::-1] * mask, atol=1e-12)


@given(rows, fractions, fractions)
def test_masked_tokens_anywhere_change_nothing_at_sampled_ones_whatever_they_hold(row, gamma, lam) -> None:
    mask, rewards, values = row
    sampled = mask == 1
    short = generalised_advantages(rewards[sampled], values[sampled], gamma=gamma, lam=lam)
    short_returns = discounted_returns(rewards[sampled], gamma=gamma)
    for nothing in (0.0, math.nan):
        padded, padded_values = np.where(sampled, rewards, nothing), np.where(sampled, values, math.nan)
        long = generalised_advantages(padded, padded_values, gamma=gamma, lam=lam, mask=mask)
        assert long[sampled].tolist() == short.tolist()
        assert discounted_returns(padded, gamma=gamma, mask=mask)[sampled].tolist() == short_returns.tolist()
        assert not long[~sampled].any()


def test_a_reward_on_a_token_that_was_not_sampled_is_an_error() -> None:
    with pytest.raises(CreditError, match=r"token 1 has reward 0\.5, but was not sampled"):
        discounted_returns([0, 0.5, 1], gamma=1.0, mask=[1, 0, 1])
    with pytest.raises(CreditError, match="put it on a sampled token"):
        generalised_advantages([0, 0.5, 1], [0, 0, 0], gamma=1.0, lam=1.0, mask=[1, 0, 1])


def test_a_row_has_its_reward_on_its_last_token_or_where_it_says() -> None:
    row = credit_row(1.0, num_tokens=3)
    assert token_rewards(row).tolist() == [0, 0, 1]
    assert token_rewards(replace(row, token_rewards=(0.5, 0.25, 0.25))).tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("wrong", [(0.5, 0.5), (0.5, 0.5, 0.5)])
def test_token_rewards_must_fit_the_row(wrong) -> None:
    row = replace(credit_row(1.0, num_tokens=3), token_rewards=wrong)
    with pytest.raises(CreditError, match=f"{row.sample_id} of agent solver has 3 tokens and reward 1.0"):
        token_rewards(row)


@pytest.mark.parametrize(("values", "found"), [(None, "none"), ((0.5,), "1")])
def test_a_row_without_a_value_for_each_token_is_refused(values, found: str) -> None:
    row = replace(credit_row(1.0, num_tokens=3), values=values)
    with pytest.raises(CreditError, match=f"{row.sample_id} of agent solver has 3 tokens and {found} values"):
        token_values(row)
