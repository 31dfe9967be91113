"""Laws P1 to P6 and P11, the worked example W3, and each loss against its formula written out, in float64."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from flexmarl.testing.training import check_loss
from flexmarl.training.batching import Rows, rows_of
from flexmarl.training.losses import LOSSES, Cispo, Gmpo, Gspo, PolicyLoss, Ppo, ReinforceLoss, Sapo

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


@st.composite
def rows_of_tokens(draw: st.DrawFn) -> tuple[list[int], list[float], list[float], list[float]]:
    """Lengths of rows, some of them empty; each token's log-probabilities, now and before; one advantage per row."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
    logprobs = st.lists(st.floats(-4, -0.01), min_size=sum(lengths), max_size=sum(lengths))
    advantages = draw(st.lists(st.floats(-3, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, draw(logprobs), draw(logprobs), advantages


def per_row(values: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [list(values[a:b]) for a, b in pairwise(edges)]


def row_mean_gradient(
    loss: PolicyLoss, lengths: Sequence[int], now: Sequence[float], old: Sequence[float], advantages: Sequence[float]
) -> Tensor:
    """Gradient of the sum over rows of the mean over their tokens."""
    rows, logprobs = rows_of(lengths), torch.tensor(now, dtype=torch.float64, requires_grad=True)
    each = rows.spread(torch.tensor(advantages, dtype=torch.float64))
    losses, _ = loss.per_token(logprobs, torch.tensor(old, dtype=torch.float64), each, rows)
    (gradient,) = torch.autograd.grad(rows.mean(losses).sum(), logprobs)
    return gradient


@pytest.mark.parametrize("name", LOSSES.built_in)
@given(batch=rows_of_tokens())
@settings(max_examples=40, deadline=None)
def test_p1_at_the_old_policy_every_loss_has_the_gradient_of_minus_advantage_times_logprob(
    name: str, batch: tuple[list[int], list[float], list[float], list[float]]
) -> None:
    lengths, now, _, advantages = batch
    found = row_mean_gradient(LOSSES[name](), lengths, now, now, advantages).tolist()
    expected = [-a / n for a, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


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


@given(batch=rows_of_tokens(), wide=st.booleans())
@settings(max_examples=100, deadline=None)
def test_p5_the_token_form_of_gspo_has_the_gradient_of_the_ratio_of_rows(
    batch: tuple[list[int], list[float], list[float], list[float]], wide: bool
) -> None:
    lengths, now, old, advantages = batch
    loss = Gspo(clip_low=0.5, clip_high=2.0) if wide else Gspo()
    found = row_mean_gradient(loss, lengths, now, old, advantages)
    logprobs = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    rows = zip(torch.split(logprobs, lengths), per_row(old, lengths), advantages, strict=True)
    for lp, before, a in rows:
        if len(lp):
            ratio = (lp - torch.tensor(before, dtype=torch.float64)).mean().exp()
            total = total + torch.maximum(-a * ratio, -a * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high))
    (expected,) = torch.autograd.grad(total, logprobs)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-14)


def test_p6_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    loss = Cispo(clip_low=0.4, clip_high=1.0)
    _, gradient, clipped = loss_and_gradient(loss, [0.1, 1.3, 7.0, 7.0], [1.0, 1.0, 1.0, -2.0])
    assert gradient.tolist() == pytest.approx([-0.6, -1.3, -2.0, 4.0], rel=1e-12)
    assert clipped.tolist() == [True, False, True, True]


def test_cispo_has_no_lower_bound_unless_one_is_set() -> None:
    _, gradient, clipped = loss_and_gradient(Cispo(), [1e-6, 4.9, 5.1], [1.0] * 3)
    assert gradient.tolist() == pytest.approx([-1e-6, -4.9, -5.0], rel=1e-9)
    assert clipped.tolist() == [False, False, True]


@given(st.floats(0.01, 20), st.floats(-3, 3))
@settings(max_examples=100, deadline=None)
def test_sapo_is_its_formula_and_its_slope_fades_on_both_sides(ratio: float, advantage: float) -> None:
    losses, gradient, _ = loss_and_gradient(Sapo(), [ratio], [advantage])
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert losses.item() == pytest.approx(-advantage * 4 / tau * gate, rel=1e-12, abs=1e-15)
    assert gradient.item() == pytest.approx(-advantage * 4 * gate * (1 - gate) * ratio, rel=1e-11, abs=1e-15)


@given(batch=rows_of_tokens())
@settings(max_examples=100, deadline=None)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(
    batch: tuple[list[int], list[float], list[float], list[float]],
) -> None:
    lengths, now, old, advantages = batch
    rows = rows_of(lengths)
    each = rows.spread(torch.tensor(advantages, dtype=torch.float64))
    current, before = torch.tensor(now, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
    found, _ = Gmpo(clip_low=0.3, clip_high=0.5).per_token(current, before, each, rows)
    for losses, lp, mu, a in zip(
        per_row(found.tolist(), lengths), per_row(now, lengths), per_row(old, lengths), advantages, strict=True
    ):
        differences = [x - y for x, y in zip(lp, mu, strict=True)]
        if a > 0:
            differences = [min(d, 0.5) for d in differences]
        elif a < 0:
            differences = [max(d, -0.3) for d in differences]
        expected = -a * math.exp(sum(differences) / len(differences)) if differences else 0.0
        assert losses == pytest.approx([expected] * len(lp), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("name", LOSSES.built_in)
@given(batch=rows_of_tokens())
@settings(max_examples=25, deadline=None)
def test_p11_one_small_step_lowers_the_loss_of_a_fixed_batch(
    name: str, batch: tuple[list[int], list[float], list[float], list[float]]
) -> None:
    lengths, now, old, advantages = batch
    rows, loss = rows_of(lengths), LOSSES[name]()
    current, before = torch.tensor(now, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
    each = rows.spread(torch.tensor(advantages, dtype=torch.float64))
    gradient = row_gradient(loss, current, before, each, rows)
    after = current - 1e-7 * gradient
    beyond = row_gradient(loss, after, before, each, rows)
    assume((beyond - gradient).norm() <= 1e-3 * gradient.norm())  # At the kink of a clip no step helps.
    if isinstance(loss, Cispo):  # Its weight has no gradient: what a step lowers is the loss with the weight held.
        loss, each = ReinforceLoss(), each * (current - before).exp().clamp(max=5)

    def total(logprobs: Tensor) -> float:
        return loss.per_token(logprobs, before, each, rows)[0].sum().item()

    assert total(after) <= total(current) - 0.9e-7 * gradient.square().sum().item() + 1e-13


def row_gradient(loss: PolicyLoss, now: Tensor, old: Tensor, advantages: Tensor, rows: Rows) -> Tensor:
    logprobs = now.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.per_token(logprobs, old, advantages, rows)[0].sum(), logprobs)
    return gradient


@pytest.mark.parametrize("name", ["gspo", "sapo", "gmpo"])
def test_losses_of_rows_refuse_another_aggregation(name: str) -> None:
    assert LOSSES[name]().aggregation == "seq-mean-token-mean"
    with pytest.raises(ValidationError, match=f"aggregation is 'token-mean', but the loss '{name}' is defined as a"):
        LOSSES[name].model_validate({"aggregation": "token-mean"})


def test_a_huge_log_ratio_stays_finite() -> None:
    logprobs = torch.tensor([-1.0, -2000.0], dtype=torch.float64)
    losses, _ = Ppo(dual_clip=None).per_token(
        logprobs, logprobs.flip(0), -torch.ones(2, dtype=torch.float64), rows_of([2])
    )
    assert losses.tolist() == pytest.approx([math.exp(20), 0.8], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES.built_in)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_loss_and_no_gradient_is_infinite(name: str, advantage: float) -> None:
    logprobs = torch.tensor([-1.0, -2000.0, -2000.0, -1.0], dtype=torch.float64)
    rows, each = rows_of([2, 1, 1]), torch.full((4,), advantage, dtype=torch.float64)
    losses, _ = LOSSES[name]().per_token(logprobs, logprobs.flip(0), each, rows)
    assert losses.isfinite().all()
    assert row_gradient(LOSSES[name](), logprobs, logprobs.flip(0), each, rows).isfinite().all()


def test_the_norm_mode_and_its_horizon_go_together() -> None:
    with pytest.raises(ValidationError, match="horizon_tokens is None with aggregation 'seq-mean"):
        Ppo(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValidationError, match="horizon_tokens is 8 with aggregation 'token-mean'"):
        ReinforceLoss(horizon_tokens=8)


@pytest.mark.parametrize("name", LOSSES.built_in)
def test_every_loss_passes_the_conformance_check(name: str) -> None:
    check_loss(LOSSES[name]())


class Constant(ReinforceLoss):
    """A loss that the advantage does not multiply, which does not say so."""

    def per_token(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows) -> Any:
        return -logprobs, logprobs.detach() > 0


class Mixed(ReinforceLoss):
    """A loss whose rows depend on one another."""

    def per_token(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows) -> Any:
        return -advantages * (logprobs - logprobs.mean()), logprobs.detach() > 0


@pytest.mark.parametrize(("loss", "law"), [(Constant(), "advantage 0 has no gradient"), (Mixed(), "other rows")])
def test_the_check_of_losses_names_the_law_that_breaks(loss: PolicyLoss, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_loss(loss)
