"""Laws K1 to K4, and what settings refuse. Gradients by enumeration of a categorical distribution, in float64."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from flexmarl.training.kl import Divergence, KlSettings, divergence

KINDS = get_args(Divergence)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def two_distributions(pair: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    policy, reference = zip(*pair, strict=True)
    return double(list(policy)).requires_grad_(), double(list(reference)).log_softmax(-1)


pairs = st.lists(st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)), min_size=2, max_size=5)
"""Logits of both; near enough for no bound of k3 to act."""


def test_the_worked_numbers() -> None:
    lp, ref = double([-1.0, -0.5]), double([-0.7, -0.9])
    assert divergence("k1", lp, ref).tolist() == pytest.approx([-0.3, 0.4], rel=1e-12)
    assert divergence("abs", lp, ref).tolist() == pytest.approx([0.3, 0.4], rel=1e-12)
    assert divergence("k2", lp, ref).tolist() == pytest.approx([0.045, 0.08], rel=1e-12)
    assert divergence("k3", lp, ref).tolist() == pytest.approx([0.0498588, 0.0703200], abs=5e-8)
    assert divergence("k3+", lp, ref).tolist() == pytest.approx([0.0498588, 0.0703200], abs=5e-8)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8))
def test_k1_k3_is_never_negative(tokens: list[tuple[float, float]]) -> None:
    lp, ref = (double(list(side)) for side in zip(*tokens, strict=True))
    assert divergence("k3", lp, ref).min() >= -1e-15
    assert divergence("k3+", lp, ref).min() >= -1e-15


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+"])
def test_k1_at_the_reference_value_and_gradient_are_zero(kind: Divergence) -> None:
    lp = double([-1.0, -7.5, 0.0]).requires_grad_()
    found = divergence(kind, lp, lp.detach())
    (gradient,) = torch.autograd.grad(found.sum(), lp)
    assert found.tolist() == gradient.tolist() == [0.0] * 3


@given(pairs)
@settings(max_examples=100, deadline=None)
def test_k2_k1_and_k3_have_the_expectation_of_the_divergence(pair: list[tuple[float, float]]) -> None:
    policy, ref = two_distributions(pair)
    lp = policy.detach().log_softmax(-1)
    exact = (lp.exp() * (lp - ref)).sum().item()
    for kind in ("k1", "k3", "k3+"):
        assert (lp.exp() * divergence(kind, lp, ref)).sum().item() == pytest.approx(exact, rel=1e-9, abs=1e-12)


def expected_gradient(kind: Divergence, policy: Tensor, ref: Tensor) -> Tensor:
    """What a sampled token's gradient is on average: the probabilities do not know that they are differentiated."""
    lp = policy.log_softmax(-1)
    (gradient,) = torch.autograd.grad((lp.detach().exp() * divergence(kind, lp, ref)).sum(), policy)
    return gradient


def exact_gradient(policy: Tensor, ref: Tensor, *, reverse: bool) -> Tensor:
    lp = policy.log_softmax(-1)
    value = (ref.exp() * (ref - lp)).sum() if reverse else (lp.exp() * (lp - ref)).sum()
    (gradient,) = torch.autograd.grad(value, policy)
    return gradient


@given(pairs)
@settings(max_examples=100, deadline=None)
def test_k3_gradients_are_those_of_the_table(pair: list[tuple[float, float]]) -> None:
    policy, ref = two_distributions(pair)
    forward, reverse = (exact_gradient(policy, ref, reverse=which).tolist() for which in (False, True))
    assert expected_gradient("k1", policy, ref).tolist() == pytest.approx([0.0] * len(pair), abs=1e-12)
    assert expected_gradient("k2", policy, ref).tolist() == pytest.approx(forward, rel=1e-9, abs=1e-12)
    assert expected_gradient("k3+", policy, ref).tolist() == pytest.approx(forward, rel=1e-9, abs=1e-12)
    assert expected_gradient("k3", policy, ref).tolist() == pytest.approx(reverse, rel=1e-9, abs=1e-12)


@given(pairs)
@settings(max_examples=50, deadline=None)
def test_k1_in_the_reward_has_the_gradient_of_the_divergence(pair: list[tuple[float, float]]) -> None:
    policy, ref = two_distributions(pair)
    lp = policy.log_softmax(-1)
    price = divergence("k1", lp.detach(), ref)
    (gradient,) = torch.autograd.grad((lp.detach().exp() * price * lp).sum(), policy)  # REINFORCE on the price
    assert gradient.tolist() == pytest.approx(exact_gradient(policy, ref, reverse=False).tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_k4_it_is_finite_a_thousand_nats_away(kind: Divergence) -> None:
    lp = double([-1000.0, 0.0]).requires_grad_()
    found = divergence(kind, lp, double([0.0, -1000.0]))
    (gradient,) = torch.autograd.grad(found.sum(), lp)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


def test_k1_in_the_loss_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"expected gradient is 0.*use type: k3\+, or where: reward"):
        KlSettings(type="k1")
    assert KlSettings(type="k1", where="reward").coef == 0.001


def test_a_coefficient_adapts_in_the_reward_only_and_needs_target_and_horizon() -> None:
    with pytest.raises(ValidationError, match=r"target is 0\.1 and horizon None; they go together"):
        KlSettings(where="reward", target=0.1)
    with pytest.raises(ValidationError, match="only the coefficient of where: reward adapts"):
        KlSettings(target=0.1, horizon=10)


@given(st.floats(0, 1), st.integers(1, 50), st.floats(0.01, 2))
def test_a_coefficient_follows_the_divergence_by_at_most_a_fifth_of_its_share(
    kl: float, rows: int, coef: float
) -> None:
    settings = KlSettings(where="reward", target=0.2, horizon=100)
    expected = coef * (1 + max(-0.2, min(0.2, kl / 0.2 - 1)) * rows / 100)
    assert settings.adapted(coef, kl, rows) == pytest.approx(expected, rel=1e-12)
    assert math.isclose(settings.adapted(coef, 0.2, rows), coef, rel_tol=1e-12), "at the target it stays"
    assert KlSettings(where="reward").adapted(coef, kl, rows) == coef
