"""Off-policy corrections: laws P7 to P10, and a whole update against plain PyTorch, in float64."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import MicroBatch, PolicyName, Sample
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.causal_lm import KeepFloat64
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.batching import rows_of
from flexmarl.training.corrections import (
    CorrectionSettings,
    IcePop,
    MultiLevelImportanceSampling,
    NoCorrection,
    Sampled,
    TruncatedImportanceSampling,
)
from flexmarl.training.interface import UpdateReport
from flexmarl.training.losses import LossSettings, Ppo, ReinforceLoss
from flexmarl.training.settings import AdamWSettings, TrainingSettings

SOLVER = PolicyName("solver")
logprobs = st.floats(-30, 0)
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]


def sampled(current: Sequence[float], drawn_from: Sequence[float], *, fresh: bool = False) -> Sampled:
    def tensor(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Sampled(
        current=tensor(current),
        recorded=tensor(drawn_from),
        drawn_from=tensor(drawn_from),
        fresh=torch.full((len(current),), fresh),
        rows=rows_of([len(current)]),
    )


def in_rows(pairs: Sequence[Sequence[tuple[float, float]]]) -> Sampled:
    """Of rows of tokens (current, drawn from)."""
    flat = [pair for row in pairs for pair in row]
    return replace(sampled([lp for lp, _ in flat], [mu for _, mu in flat]), rows=rows_of([len(row) for row in pairs]))


@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=8), st.floats(0.1, 10))
def test_p8_the_weight_is_the_importance_ratio_up_to_the_cap(pairs: list[tuple[float, float]], cap: float) -> None:
    tokens = sampled(*zip(*pairs, strict=True))
    found = TruncatedImportanceSampling(cap=cap).weights(tokens).tolist()
    assert found == pytest.approx([min(math.exp(max(-20, min(20, lp - mu))), cap) for lp, mu in pairs], rel=1e-12)
    assert max(found) <= cap


EVERY_CORRECTION = [
    {"type": "none"},
    {"type": "tis"},
    {"type": "tis", "cap": None, "veto": 1e-4},
    {"type": "icepop", "low": 1.0, "high": 1.0},
    *(
        {"type": "mis", "level": level, "mode": mode, "high": 1.0, "veto": 0.5}
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
    ),
]


def read(chosen: object) -> CorrectionSettings:
    return TypeAdapter[CorrectionSettings](CorrectionSettings).validate_python(chosen)


@pytest.mark.parametrize("chosen", EVERY_CORRECTION)
@given(st.lists(logprobs, min_size=1, max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_p7_tokens_that_the_trained_weights_drew_weigh_one_and_are_compared_with_them(
    chosen: dict[str, object], current: list[float], fresh: bool
) -> None:
    correction, tokens = read(chosen), sampled(current, current, fresh=fresh)
    assert correction.weights(tokens).tolist() == [1.0] * len(current)
    assert correction.old_logprobs(tokens).tolist() == current


rows = st.lists(st.lists(st.tuples(logprobs, logprobs), max_size=4), min_size=1, max_size=4).filter(any)


@given(rows, st.floats(0.05, 1), st.floats(1, 5))
def test_p8_icepop_masks_outside_its_bounds_and_keeps_the_bounds_themselves(
    pairs: list[list[tuple[float, float]]], low: float, high: float
) -> None:
    found = IcePop(low=low, high=high).weights(in_rows(pairs)).tolist()
    ratios = [math.exp(max(-20, min(20, lp - mu))) for row in pairs for lp, mu in row]
    assert found == pytest.approx([ratio if low <= ratio <= high else 0.0 for ratio in ratios], rel=1e-12)
    at_bounds = sampled([math.log(0.5), math.log(2.0)], [0.0, 0.0])
    least, most = at_bounds.log_ratio.exp().tolist()
    assert IcePop(low=least, high=most).weights(at_bounds).tolist() == [least, most]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(rows, st.floats(1, 5))
def test_p8_mis_is_bounded_at_the_level_it_is_asked_for(
    level: Literal["token", "sequence", "geometric"], pairs: list[list[tuple[float, float]]], high: float
) -> None:
    tokens, ratios = in_rows(pairs), list[float]()
    for row in pairs:
        logs, n = [lp - mu for lp, mu in row], max(len(row), 1)
        own = {"token": logs, "sequence": [sum(logs)] * len(row), "geometric": [sum(logs) / n] * len(row)}
        ratios += [math.exp(max(-20, min(20, x))) for x in own[level]]
    truncate = MultiLevelImportanceSampling(level=level, high=high).weights(tokens).tolist()
    assert truncate == pytest.approx([min(ratio, high) for ratio in ratios], rel=1e-11)
    mask = MultiLevelImportanceSampling(level=level, mode="mask", high=high).weights(tokens).tolist()
    clear = [(w, r) for w, r in zip(mask, ratios, strict=True) if min(abs(r - high), abs(r - 1 / high)) > 1e-9]
    assert [w for w, _ in clear] == pytest.approx([r if 1 / high <= r <= high else 0.0 for _, r in clear], rel=1e-11)


@pytest.mark.parametrize("chosen", [{"type": "tis"}, {"type": "icepop"}, {"type": "mis", "level": "geometric"}])
def test_p8_a_veto_zeroes_the_whole_row_and_no_other(chosen: dict[str, object]) -> None:
    tokens = in_rows([[(-1.0, -1.0), (-11.0, -1.0)], [], [(-1.5, -1.0)]])
    without, vetoing = read(chosen).weights(tokens).tolist(), read({**chosen, "veto": 1e-4}).weights(tokens).tolist()
    assert vetoing == [0.0, 0.0, without[2]]
    *_, vetoed = read({**chosen, "veto": 1e-4}).measured(tokens)
    assert vetoed.tolist() == [1.0, 1.0, 0.0]
    assert read({**chosen, "veto": 1e-5}).weights(tokens).tolist() == without, "exp(-10) is above it"


def test_a_token_exactly_as_unlikely_as_the_veto_is_none() -> None:
    at_it, below = sampled([math.log(0.5)], [0.0]), sampled([math.log(0.49)], [0.0])
    assert TruncatedImportanceSampling(veto=0.5).weights(at_it).tolist() == pytest.approx([0.5])
    assert TruncatedImportanceSampling(veto=0.5).weights(below).tolist() == [0.0]


@pytest.mark.parametrize("chosen", [{"type": "tis", "cap": 2.0}, {"type": "icepop", "high": 2.0}])
def test_what_a_veto_zeroes_is_counted_as_vetoed_and_as_nothing_else(chosen: dict[str, object]) -> None:
    tokens = in_rows([[(-1.0, -2.0), (-11.0, -1.0)], [(-1.0, -2.0)]])
    weights, squares, clipped, masked, vetoed = (
        column.tolist() for column in read({**chosen, "veto": 1e-4}).measured(tokens)
    )
    assert squares == [weight**2 for weight in weights]
    assert vetoed == [1.0, 1.0, 0.0]
    assert [c + m for c, m in zip(clipped, masked, strict=True)] == [0.0, 0.0, 1.0]


@given(rows)
def test_p10_without_a_cap_tis_is_decoupled_ppo(pairs: list[list[tuple[float, float]]]) -> None:
    tokens = in_rows(pairs)
    decoupled, capped = TruncatedImportanceSampling(cap=None), TruncatedImportanceSampling(cap=1e300)
    expected = [math.exp(max(-20, min(20, lp - mu))) for row in pairs for lp, mu in row]
    assert decoupled.weights(tokens).tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(decoupled.weights(tokens), capped.weights(tokens))
    assert torch.equal(decoupled.old_logprobs(tokens), tokens.current)


def test_tis_has_a_smallest_weight_too() -> None:
    tokens = sampled([-3.0, -1.0], [-1.0, -1.0])
    assert TruncatedImportanceSampling(low=0.5).weights(tokens).tolist() == [0.5, 1.0]


def test_bounds_that_exclude_everything_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"low is 3\.0, above cap, which is 2\.0; use low: 0"):
        TruncatedImportanceSampling(low=3.0)
    with pytest.raises(ValidationError, match=r"low is 3\.0, above high, which is 2\.0; use"):
        IcePop(low=3.0)
    assert TruncatedImportanceSampling(low=2.0, cap=2.0).weights(sampled([-1.0], [-1.0])).tolist() == [2.0]


def test_without_a_correction_older_tokens_are_compared_with_what_was_recorded() -> None:
    tokens = sampled([-1.0], [-2.0])
    assert NoCorrection().old_logprobs(tokens).tolist() == [-2.0]
    assert TruncatedImportanceSampling().old_logprobs(tokens).tolist() == [-1.0]


def test_it_tells_how_much_it_weighs_and_how_often_it_truncates() -> None:
    weight, _, truncated, *_ = TruncatedImportanceSampling(cap=2.0).measured(sampled([-1.0, -1.0], [-2.0, -0.5]))
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert truncated.tolist() == [1.0, 0.0]


def test_a_correction_is_chosen_by_its_type() -> None:
    assert read({"type": "none"}) == NoCorrection()
    assert read({"type": "tis", "cap": 3}) == TruncatedImportanceSampling(cap=3.0)


def naive_update(model: PreTrainedModel, samples: Sequence[Sample], cap: float) -> torch.Tensor:
    """Row by row on PyTorch's plain AdamW: sum of w_i min(pi / mu, cap) (-A lp), over all tokens, truncated or not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False, fused=False)
    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        n = sample.num_tokens
        tokens += sample.weight * n
        if n:
            ids = torch.tensor([*sample.turn.prompt_ids, *sample.turn.response_ids], dtype=torch.long)
            predicted = model(input_ids=ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
            for place in range(n):
                lp = predicted[place, ids[-n + place]]
                ratio = math.exp(lp.item() - float(sample.turn.logprobs[place]))
                total = total - sample.weight * sample.advantage * min(ratio, cap) * lp
    optimizer.zero_grad()
    (total / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return weights_of(model)


def weights_of(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def update(
    model: PreTrainedModel, samples: Sequence[Sample], correction: CorrectionSettings, loss: LossSettings | None = None
) -> tuple[torch.Tensor, UpdateReport]:
    chosen = TrainingSettings(
        dtype="float64",
        optimizer=AdamWSettings(learning_rate=1e-2, weight_decay=0.1),
        loss=loss or Ppo(),
        correction=correction,
    )

    async def run() -> tuple[torch.Tensor, UpdateReport]:
        trainer = SingleProcessTrainer(SOLVER, model, chosen, InlineObjectStore(), version=3)
        for number in range(0, len(samples), 3):
            part = tuple(samples[number : number + 3])
            await trainer.accumulate_batch(MicroBatch(micro_batch_id=f"mb/{number}", policy=SOLVER, samples=part))
        update = await trainer.step(divisors_of(samples))
        return weights_of(model), update

    return asyncio.run(run())


def filtered_sampling(samples: Sequence[Sample]) -> list[Sample]:
    """The same, but drawn from another distribution than the model's own: `logprobs` and `raw_logprobs` differ."""
    return [replace(one, turn=replace(one.turn, logprobs=one.turn.raw_logprobs + np.float32(0.25))) for one in samples]


@given(seed=st.integers(0, 10_000), cap=st.sampled_from([0.01, 0.3, 2.0, 1e9]))
@settings(max_examples=15, deadline=None)
def test_p9_the_update_is_the_weighted_gradient_over_the_original_counts(
    make_model: Model, make_samples: Samples, seed: int, cap: float
) -> None:
    samples = filtered_sampling(make_samples(seed, 4, version=1, weights=(1.0, 0.5), empty=0.0))
    with KeepFloat64():
        expected = naive_update(make_model(dtype=torch.float64), samples, cap)
    found, _ = update(make_model(), samples, TruncatedImportanceSampling(cap=cap))
    assert float((found - expected).norm() / expected.norm()) <= 1e-10


def test_every_loss_is_corrected_alike_because_a_step_has_one_update(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(5, version=1)
    ppo, _ = update(make_model(), samples, TruncatedImportanceSampling(), Ppo())
    reinforce, _ = update(make_model(), samples, TruncatedImportanceSampling(), ReinforceLoss())
    assert float((ppo - reinforce).norm() / reinforce.norm()) <= 1e-12


def test_an_update_reports_the_mean_weight_and_the_share_truncated(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(7, version=1, zero_advantages=0.0, weights=(1.0,))
    _, mild = update(make_model(), samples, TruncatedImportanceSampling(cap=1e9))
    _, harsh = update(make_model(), samples, TruncatedImportanceSampling(cap=1e-6))
    assert mild.means["correction_clipped"] == 0
    assert harsh.means["correction_clipped"] == 1
    assert harsh.means["correction_weight"] == pytest.approx(1e-6)
    _, none = update(make_model(), samples, NoCorrection())
    assert not [name for name in none.means if name.startswith("correction")]
