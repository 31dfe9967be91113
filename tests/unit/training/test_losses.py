"""Laws P1 to P4 and the worked example W3, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from flexmarl.training.losses import LOSSES, PolicyLoss, Ppo, Reinforce
from flexmarl.training.token_rows import rows_of

OLD = -1.0


def at_ratios(ratios: list[float]) -> tuple[Tensor, Tensor]:
    old = torch.full((len(ratios),), OLD, dtype=torch.float64)
    return (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(), old


def loss_and_gradient(loss: PolicyLoss, ratios: list[float], advantages: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, old = at_ratios(ratios)
    losses, clipped = loss.per_token(
        logprobs, old, torch.tensor(advantages, dtype=torch.float64), rows_of([1] * len(ratios))
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient, clipped


def test_w3_clipped_on_both_sides_and_by_the_dual_clip() -> None:
    losses, gradient, clipped = loss_and_gradient(Ppo(), [1.5, 0.5, 4.0, 1.1], [1.0, -1.0, -1.0, -1.0])
    assert losses.tolist() == pytest.approx([-1.28, 0.8, 3.0, 1.1], rel=1e-12)
    assert losses.mean().item() == pytest.approx(0.905, rel=1e-12)
    assert gradient.tolist() == pytest.approx([0, 0, 0, 1.1], rel=1e-12)
    assert clipped.tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", LOSSES)
def test_p1_at_the_old_policy_every_loss_has_the_gradient_of_minus_advantage_times_logprob(name: str) -> None:
    advantages = [1.5, -0.3, 0.0, -2.0]
    _, gradient, clipped = loss_and_gradient(LOSSES[name](), [1.0] * 4, advantages)
    assert gradient.tolist() == pytest.approx([-a for a in advantages], abs=1e-15)
    assert not clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.29, 1.0, 0.0),  # already likelier than the upper bound: no push further up
        (1.29, -1.0, 1.29),  # but a push down
        (0.79, -1.0, 0.0),
        (0.79, 1.0, -0.79),
        (1.27, 1.0, -1.27),  # 1.27 is inside [0.8, 1.28], outside a symmetric 0.2
    ],
)
def test_p2_the_gradient_vanishes_only_where_clipped_in_the_profitable_direction(
    ratio: float, advantage: float, gradient: float
) -> None:
    _, found, clipped = loss_and_gradient(Ppo(), [ratio], [advantage])
    assert found.item() == pytest.approx(gradient, rel=1e-12)
    assert clipped.item() == (gradient == 0)


@given(st.floats(0.01, 50), st.floats(-3, 3), st.floats(1.01, 10))
@settings(max_examples=200, deadline=None)
def test_p3_p4_dual_clip_bounds_the_loss_and_is_otherwise_not_there(ratio: float, advantage: float, c: float) -> None:
    dual, dual_gradient, _ = loss_and_gradient(Ppo(dual_clip=c), [ratio], [advantage])
    plain, plain_gradient, _ = loss_and_gradient(Ppo(dual_clip=None), [ratio], [advantage])
    if advantage < 0:
        assert dual.item() <= -c * advantage
    if advantage < 0 and plain.item() > -c * advantage:
        assert dual_gradient.item() == 0
    else:
        assert (dual.item(), dual_gradient.item()) == (plain.item(), plain_gradient.item())


def test_p4_an_infinite_dual_clip_is_no_dual_clip() -> None:
    ratios, advantages = [0.1, 1.0, 30.0], [-1.0, -2.0, -0.5]
    infinite = loss_and_gradient(Ppo(dual_clip=1e300), ratios, advantages)
    off = loss_and_gradient(Ppo(dual_clip=None), ratios, advantages)
    assert all(torch.equal(a, b) for a, b in zip(infinite, off, strict=True))


def test_a_huge_log_ratio_stays_finite() -> None:
    logprobs = torch.tensor([-1.0, -2000.0], dtype=torch.float64)
    losses, _ = Ppo(dual_clip=None).per_token(
        logprobs, logprobs.flip(0), -torch.ones(2, dtype=torch.float64), rows_of([2])
    )
    assert losses.tolist() == pytest.approx([math.exp(20), 0.8], rel=1e-12)


def test_the_norm_mode_and_its_horizon_go_together() -> None:
    with pytest.raises(ValidationError, match="horizon_tokens is None with aggregation 'seq-mean"):
        Ppo(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValidationError, match="horizon_tokens is 8 with aggregation 'token-mean'"):
        Reinforce(horizon_tokens=8)
