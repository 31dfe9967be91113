"""Decides discounted returns and generalised advantages along a sequence of steps (docs/math.md section 12).

A step is a sampled token or a call. Steps that nobody sampled, such as observation tokens inside a row, are masked.
They have no place in the sequence, so later rewards pass over them without a discount.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit.interface import CreditRow
from flexmarl.errors import CreditError

Steps = NDArray[np.float64]
"""[T] one number per step; 0 where the mask is 0."""


def discounted_returns(rewards: Sequence[float] | Steps, *, gamma: float, mask: Sequence[float] | None = None) -> Steps:
    """Returns G_t = r_t + gamma G_next, where `next` is the next sampled step.

    >>> discounted_returns([0, 0, 1], gamma=0.5).tolist()
    [0.25, 0.5, 1.0]
    """
    rewards, sampled = _sampled(rewards, mask)
    returns, following = np.zeros(len(rewards)), 0.0
    for t in reversed(sampled):
        returns[t] = following = rewards[t] + gamma * following
    return returns


def generalised_advantages(
    rewards: Sequence[float] | Steps,
    values: Sequence[float] | Steps,
    *,
    gamma: float,
    lam: float,
    mask: Sequence[float] | None = None,
) -> Steps:
    """GAE (arXiv 1506.02438): A_t = delta_t + gamma lam A_next, with delta_t = r_t + gamma V_next - V_t.

    A and V are 0 after the last step.

    >>> generalised_advantages([0, 0, 1], [0.5, 0.5, 0.5], gamma=1, lam=1).tolist()
    [0.5, 0.5, 0.5]
    """
    rewards, sampled = _sampled(rewards, mask)
    advantages, next_value, next_advantage = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(sampled):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[t]
    return advantages


def token_rewards(row: CreditRow) -> Steps:
    """[num_tokens] the row's token rewards, or its whole reward on the last token.

    Raises CreditError if the token rewards do not add up to the reward, or there is not one per token.
    """
    assert row.reward is not None, "in_order refuses rows without a reward"
    if row.token_rewards is None:
        rewards = np.zeros(row.num_tokens)
        rewards[-1] = row.reward
        return rewards
    rewards = np.array(row.token_rewards, np.float64)
    if len(rewards) != row.num_tokens or not np.isclose(rewards.sum(), row.reward, rtol=1e-9, atol=1e-9):
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has {row.num_tokens} tokens and reward {row.reward}, but "
            f"{len(rewards)} token rewards that add up to {rewards.sum()}; each token has one, and their sum is the "
            f"reward"
        )
    return rewards


def token_values(row: CreditRow) -> Steps:
    """[num_tokens] the critic's value at each token. Raises CreditError if there is not one per token."""
    if row.values is None or len(row.values) != row.num_tokens:
        found = "none" if row.values is None else len(row.values)
        raise CreditError(
            f"sample {row.sample_id} of agent {row.agent} has {row.num_tokens} tokens and {found} values; this "
            f"estimator compares rewards with those of a critic: train one, or use an estimator without values"
        )
    return np.array(row.values, np.float64)


def own_rewards(rows: Sequence[CreditRow]) -> Steps:
    """[N] what each call of an episode adds to a return: its own reward, and the act's reward at the act's last call.

    A return thus counts an act's reward once, however many calls of the act are in `rows`. `rows` are in hop order.
    """
    last = {row.act: place for place, row in enumerate(rows)}
    return np.array(
        [row.call_reward + (row.act_reward if last[row.act] == place else 0.0) for place, row in enumerate(rows)]
    )


def _sampled(rewards: Sequence[float] | Steps, mask: Sequence[float] | None) -> tuple[Steps, list[int]]:
    rewards = np.asarray(rewards, np.float64)
    if mask is None:
        return rewards, list(range(len(rewards)))
    masked = np.asarray(mask) == 0
    for t in np.flatnonzero(masked):
        # Padding may hold NaN. Any other reward on a masked token would silently be lost.
        if not np.isnan(rewards[t]) and rewards[t] != 0:
            raise CreditError(f"token {t} has reward {rewards[t]}, but was not sampled; put it on a sampled token")
    return rewards, np.flatnonzero(~masked).tolist()
