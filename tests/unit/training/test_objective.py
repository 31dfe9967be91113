"""Laws A1 to A6 of the whole objective, whatever it is made of, in float64; and what each of its terms adds.

The model is two vectors: a token's log-probability, entropy and value are smooth functions of theta @ x, x its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexmarl.errors import TrainingError
from flexmarl.records import AgentName, Divisors, LossReport, Sample, Version
from flexmarl.training.aggregation import divisors_of, token_weights
from flexmarl.training.backends.forward import TokenOutputs
from flexmarl.training.backends.objective import Objective
from flexmarl.training.losses import LOSSES
from flexmarl.training.settings import TrainingSettings

Samples = Callable[..., list[Sample]]
WIDTH = 3
AGENTS = (AgentName("solver"), AgentName("checker"))


@dataclass(frozen=True)
class Row:
    """A sample, and what the model and the reference see at its tokens."""

    sample: Sample
    x: np.ndarray
    reference: np.ndarray
    broken: bool = False
    """Whether the model gives NaN."""


def rows_from(make_samples: Samples, seed: int, *, old: bool = True, num_episodes: int = 5) -> list[Row]:
    """Ragged rows of two agents in random order: some empty, of weight 0, with advantages per token, or a return."""
    random = np.random.default_rng(seed)
    rows = []
    for sample in make_samples(seed, num_episodes, version=0 if old else 1):
        n = sample.num_tokens
        changed = replace(
            sample,
            turn=replace(sample.turn, agent=AGENTS[random.integers(2)]),
            values=random.normal(size=n) if random.random() < 0.7 else None,
            returns=random.normal(size=n) if random.random() < 0.7 else None,
        )
        rows.append(Row(changed, random.normal(size=(n, WIDTH)), -1 - random.random(n)))
    return [rows[i] for i in random.permutation(len(rows))]


def parameters(seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.from_numpy(np.random.default_rng([seed, 1]).normal(size=(2, WIDTH)) / 3)
    return made[0].clone().requires_grad_(), made[1].clone().requires_grad_()


def outputs_of(rows: Sequence[Row], theta: Tensor, phi: Tensor) -> TokenOutputs:
    x = torch.from_numpy(np.concatenate([np.zeros((0, WIDTH)), *(row.x for row in rows)]))
    score, broken = x @ theta, torch.tensor([row.broken for row in rows for _ in row.x], dtype=torch.bool)
    found = (-1 - score.tanh(), 2 + score.sin(), x @ phi)
    return TokenOutputs(*(values.masked_fill(broken, math.nan) for values in found))


def summed(
    rows: Sequence[Row], chosen: TrainingSettings, params: tuple[Tensor, Tensor], scale: float = 1.0
) -> tuple[list[Tensor], float, LossReport]:
    """What one micro-batch adds: gradient sums, S, and its report."""
    objective, loss = Objective(chosen), chosen.loss
    samples = [row.sample for row in rows]
    weights = token_weights(samples, loss.aggregation, loss.horizon_tokens).tolist()
    reference = torch.from_numpy(np.concatenate([np.zeros(0), *(row.reference for row in rows)]))
    value, figures = objective(samples, weights, outputs_of(rows, *params), version=Version(1), reference=reference)
    gradients = torch.autograd.grad(value * scale, params, materialize_grads=True)
    num_tokens = sum(s.weight * s.num_tokens for s in samples)
    sums = objective.sums(samples, figures)
    report = LossReport(micro_batch_id="", num_samples=len(samples), num_tokens=num_tokens, sums=sums)
    return list(gradients), value.item(), report


def updated(
    parts: Sequence[Sequence[Row]], chosen: TrainingSettings, params: tuple[Tensor, Tensor], scale: float = 1.0
) -> np.ndarray:
    """Loss and gradient of the batch that the parts are, divided once."""
    found = [summed(part, chosen, params, scale) for part in parts]
    divisors = divisors_of(row.sample for part in parts for row in part)
    total = Objective(chosen).divisor(divisors, [report for _, _, report in found])
    gradient = sum(torch.cat(gradients) for gradients, _, _ in found)
    assert isinstance(gradient, Tensor)
    return np.append((gradient / (scale * total)).numpy(), sum(value for _, value, _ in found) / total)


TERMS: list[Mapping[str, Any]] = [
    {},
    {"kl": {"type": "k3+", "coef": 0.3}, "entropy_coef": 0.1},
    {"critic": {"coef": 0.4}, "kl": {"type": "k2", "coef": 0.2}},
    {"correction": {"type": "tis", "cap": None}},
    {"correction": {"type": "icepop", "veto": 0.4, "batch_normalise": True}},
    {"correction": {"type": "mis", "level": "sequence", "mode": "mask", "high": 3}, "critic": {}, "entropy_coef": 0.2},
    {"correction": {"type": "mis", "level": "geometric", "batch_normalise": True}},
]
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "traj-mean-token-mean", "token-sum"]


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> TrainingSettings:
    name = draw(st.sampled_from(sorted(LOSSES.built_in)))
    loss: dict[str, Any] = {"type": name}
    if name not in ("gspo", "sapo", "gmpo"):
        loss["aggregation"] = draw(st.sampled_from(AGGREGATIONS))
    if loss.get("aggregation") == "seq-mean-token-sum-norm":
        loss["horizon_tokens"] = 7
    return TrainingSettings.model_validate({"loss": loss, **draw(st.sampled_from(TERMS))})


def cut(rows: Sequence[Row], seed: int, num_parts: int) -> list[list[Row]]:
    """So many parts, uneven, some of them empty."""
    edges = sorted(np.random.default_rng([seed, 2]).integers(0, len(rows) + 1, num_parts - 1).tolist())
    return [list(rows[a:b]) for a, b in pairwise([0, *edges, len(rows)])]


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    assert np.linalg.norm(found - expected) <= 1e-12 * max(np.linalg.norm(expected), 1e-3)


@given(seed=st.integers(0, 10_000), chosen=settings_of_a_run(), parts=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_a1_a4_any_split_into_micro_batches_gives_the_full_batch(
    make_samples: Samples, seed: int, chosen: TrainingSettings, parts: int
) -> None:
    rows = rows_from(make_samples, seed)
    assume(divisors_of(row.sample for row in rows) != Divisors())
    same(updated(cut(rows, seed, parts), chosen, parameters()), updated([rows], chosen, parameters()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@given(seed=st.integers(0, 10_000), chosen=settings_of_a_run())
@settings(max_examples=25, deadline=None)
def test_a2_ranks_with_uneven_and_empty_shares_give_the_full_batch(
    make_samples: Samples, ranks: int, seed: int, chosen: TrainingSettings
) -> None:
    rows = rows_from(make_samples, seed)
    divisors = divisors_of(row.sample for row in rows)
    assume(divisors != Divisors())
    params = parameters()
    found = [summed(share, chosen, params) for share in cut(rows, seed, ranks)]
    total = Objective(chosen).divisor(divisors, [report for _, _, report in found])
    whole = updated([rows], chosen, params)[:-1]
    added = torch.stack([torch.cat(gradients) / total for gradients, _, _ in found]).sum(0)
    same(added.numpy(), whole)
    averaged = torch.stack([torch.cat(gradients) * ranks / total for gradients, _, _ in found]).mean(0)
    same(averaged.numpy(), whole)


@given(seed=st.integers(0, 10_000), chosen=settings_of_a_run(), kappa=st.sampled_from([1e-6, 1 / 96, 1e5]))
@settings(max_examples=40, deadline=None)
def test_a5_a_deferred_divisor_equals_a_known_one(
    make_samples: Samples, seed: int, chosen: TrainingSettings, kappa: float
) -> None:
    rows = rows_from(make_samples, seed)
    assume(divisors_of(row.sample for row in rows) != Divisors())
    deferred = updated(cut(rows, seed, 3), chosen, parameters(), kappa)
    same(deferred, updated([rows], chosen, parameters()))


@given(seed=st.integers(0, 10_000), chosen=settings_of_a_run())
@settings(max_examples=25, deadline=None)
def test_a4_empty_rows_and_rows_of_weight_zero_have_no_effect_whatever_is_in_them(
    make_samples: Samples, seed: int, chosen: TrainingSettings
) -> None:
    rows = rows_from(make_samples, seed)
    assume(divisors_of(row.sample for row in rows) != Divisors())
    counted = [row for row in rows if row.sample.weight and row.sample.num_tokens]
    poisoned = [row if row.sample.weight and row.sample.num_tokens else poison(row) for row in rows]
    same(updated([poisoned, []], chosen, parameters()), updated([counted], chosen, parameters()))


def poison(row: Row) -> Row:
    """NaN wherever nobody may look."""
    sample, nan = row.sample, np.full(row.sample.num_tokens, np.nan)
    turn = replace(sample.turn, logprobs=nan.astype(np.float32), raw_logprobs=nan.astype(np.float32))
    poisoned = replace(sample, turn=turn, advantage=math.nan, values=nan, returns=nan)
    return Row(poisoned, row.x, nan, broken=True)


@given(seed=st.integers(0, 10_000), chosen=settings_of_a_run(), other=settings_of_a_run())
@settings(max_examples=20, deadline=None)
def test_a6_policies_trained_in_turns_equal_policies_trained_alone(
    make_samples: Samples, seed: int, chosen: TrainingSettings, other: TrainingSettings
) -> None:
    mine, others = rows_from(make_samples, seed), rows_from(make_samples, seed + 1)
    assume(all(divisors_of(row.sample for row in rows) != Divisors() for rows in (mine, others)))
    first, second = parameters(1), parameters(2)
    found: list[list[Any]] = [[], []]
    for part, other_part in zip(cut(mine, seed, 3), cut(others, seed, 3), strict=True):
        found[0].append(summed(part, chosen, first))
        found[1].append(summed(other_part, other, second))
    for rows, own, params, parts in ((mine, chosen, first, found[0]), (others, other, second, found[1])):
        total = Objective(own).divisor(divisors_of(row.sample for row in rows), [report for _, _, report in parts])
        together = sum(torch.cat(gradients) for gradients, _, _ in parts) / total
        assert isinstance(together, Tensor)
        same(together.numpy(), updated([rows], own, params)[:-1])


def one_row(make_samples: Samples, **changes: Any) -> Row:
    """A row of four tokens with advantage 0 and weight 1."""
    rows = (row for seed in range(100) for row in rows_from(make_samples, seed))
    row = next(row for row in rows if row.sample.num_tokens == 4)
    nothing: dict[str, Any] = {"advantage": 0.0, "weight": 1.0, "values": None, "returns": None}
    return replace(row, sample=replace(row.sample, **{**nothing, **changes}))


def only(make_samples: Samples, training: Mapping[str, Any], **changes: Any) -> tuple[TokenOutputs, float, LossReport]:
    row, params = one_row(make_samples, **changes), parameters()
    _, value, report = summed([row], TrainingSettings.model_validate(training), params)
    return outputs_of([row], *params), value, report


def test_the_entropy_bonus_is_taken_from_the_loss(make_samples: Samples) -> None:
    outputs, value, report = only(make_samples, {"entropy_coef": 0.3})
    assert value == pytest.approx(-0.3 * outputs.entropy.sum().item(), rel=1e-12)
    assert report.sums["entropy"] == pytest.approx(outputs.entropy.sum().item(), rel=1e-12)


def test_the_divergence_is_added_to_the_loss_with_its_coefficient(make_samples: Samples) -> None:
    outputs, value, report = only(make_samples, {"kl": {"type": "k2", "coef": 0.3}})
    distance = outputs.logprobs.detach().numpy() - one_row(make_samples).reference
    assert value == pytest.approx(0.3 * (distance**2).sum() / 2, rel=1e-12)
    assert report.sums["kl_to_reference"] == pytest.approx((distance**2).sum() / 2, rel=1e-12)


def test_a_critic_learns_returns_and_moves_no_further_than_its_clip(make_samples: Samples) -> None:
    returns, old = np.array([2.0, 2.0, -1.0, 0.3]), np.array([0.0, 5.0, 0.1, -3.0])
    outputs, value, _ = only(make_samples, {"critic": {"coef": 0.7, "clip": 0.2}}, returns=returns, values=old)
    assert outputs.values is not None
    v = outputs.values.detach().numpy()
    moved = np.clip(v, old - 0.2, old + 0.2)
    assert value == pytest.approx(0.7 * (0.5 * np.maximum((v - returns) ** 2, (moved - returns) ** 2)).sum(), rel=1e-12)
    _, unclipped, _ = only(make_samples, {"critic": {"coef": 0.7, "clip": None}}, returns=returns, values=old)
    assert unclipped == pytest.approx(0.35 * ((v - returns) ** 2).sum(), rel=1e-12)
    _, unseen, _ = only(make_samples, {"critic": {"coef": 0.7}}, returns=returns)
    assert unseen == pytest.approx(unclipped, rel=1e-12), "what credit has not looked at may move anywhere"
    assert only(make_samples, {"critic": {}})[1] == 0, "no return, nothing to learn"


@pytest.mark.parametrize(
    ("training", "skips"),
    [
        ({}, True),
        ({"critic": {}}, True),
        ({"kl": {"type": "k1", "where": "reward"}}, True),
        ({"kl": {}}, False),
        ({"entropy_coef": 0.1}, False),
        ({"correction": {"type": "tis"}}, True),
        ({"correction": {"type": "tis", "batch_normalise": True}}, False),
    ],
)
def test_rows_without_advantage_are_skipped_only_where_they_have_no_part(
    training: Mapping[str, Any], skips: bool
) -> None:
    assert Objective(TrainingSettings.model_validate(training)).skips_zero_advantages is skips


def test_terms_that_a_mean_weight_would_scale_are_refused_beside_it() -> None:
    terms = {"kl in the loss": {"kl": {}}, "entropy_coef": {"entropy_coef": 0.1}, "critic": {"critic": {}}}
    for name, term in terms.items():
        with pytest.raises(ValueError, match=f"batch_normalise is true, but {name}"):
            TrainingSettings.model_validate({"correction": {"type": "tis", "batch_normalise": True}, **term})


def test_gmpo_refuses_a_row_whose_tokens_differ(make_samples: Samples) -> None:
    with pytest.raises(TrainingError, match=r"training\.loss 'gmpo' gives a row one; use type: gspo"):
        only(make_samples, {"loss": {"type": "gmpo"}}, advantages=np.array([0.0, 1.0, 0.0, 0.0]))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_what_corrections_do_is_told_for_all_and_for_each_agent(make_samples: Samples, seed: int) -> None:
    rows = rows_from(make_samples, seed)
    chosen = TrainingSettings.model_validate({"correction": {"type": "mis", "mode": "mask", "high": 1.5, "veto": 0.3}})
    objective, params = Objective(chosen), parameters()
    reports = [summed(part, chosen, params)[2] for part in cut(rows, seed, 3)]
    means = objective.means(reports)
    for agent in ("", *AGENTS):
        own = [row for row in rows if agent in ("", row.sample.turn.agent)]
        expected = correction_figures(own, params)
        of_whom = f"/{agent}" if agent else ""
        for name, value in expected.items():
            assert means[f"{name}{of_whom}"] == pytest.approx(value, rel=1e-9, abs=1e-12)
        if not expected:
            assert f"correction_weight{of_whom}" not in means


def correction_figures(rows: Sequence[Row], params: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Token by token, in plain Python: bounds 1 / 1.5 and 1.5, veto below 0.3."""
    total, w1, w2, masked, vetoed = 0.0, 0.0, 0.0, 0.0, 0.0
    for row in rows:
        lp = outputs_of([row], *params).logprobs.detach().numpy()
        ratios = np.exp(lp - row.sample.turn.logprobs.astype(np.float64))
        for ratio in ratios:
            a, veto = row.sample.weight, bool((ratios < 0.3).any())
            outside = not 1 / 1.5 <= ratio <= 1.5
            weight = 0.0 if veto or outside else ratio
            total, w1, w2 = total + a, w1 + a * weight, w2 + a * weight**2
            masked, vetoed = masked + a * (outside and not veto), vetoed + a * veto
    if not total:
        return {}
    figures = {"correction_weight": w1, "correction_masked": masked, "correction_vetoed": vetoed}
    effective = w1**2 / (total * w2) if w2 else 0.0
    return {**{name: value / total for name, value in figures.items()}, "correction_effective": effective}


def test_a_normalised_batch_has_mean_weight_one(make_samples: Samples) -> None:
    rows = rows_from(make_samples, 3)
    plain = TrainingSettings.model_validate({"correction": {"type": "tis"}})
    normalised = TrainingSettings.model_validate({"correction": {"type": "tis", "batch_normalise": True}})
    mean = Objective(plain).means([summed(rows, plain, parameters())[2]])["correction_weight"]
    assert abs(mean - 1) > 0.01
    same(updated([rows], normalised, parameters()) * mean, updated([rows], plain, parameters()))
