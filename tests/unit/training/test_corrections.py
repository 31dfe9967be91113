"""Off-policy corrections: laws P7 to P10, and a whole update against plain PyTorch, in float64."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from flexmarl.experience.divisors import divisors_of
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.records import MicroBatch, PolicyName, Sample
from flexmarl.training.backends.causal_lm import DoubleStays
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.corrections import CorrectionSettings, NoCorrection, TruncatedImportanceSampling
from flexmarl.training.corrections.base import Sampled
from flexmarl.training.interface import UpdateReport
from flexmarl.training.losses import LossSettings, Ppo, Reinforce
from flexmarl.training.settings import AdamWSettings, TrainingSettings
from flexmarl.training.token_rows import rows_of

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


@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=8), st.floats(0.1, 10))
def test_p8_the_weight_is_the_importance_ratio_up_to_the_cap(pairs: list[tuple[float, float]], cap: float) -> None:
    tokens = sampled(*zip(*pairs, strict=True))
    found = TruncatedImportanceSampling(cap=cap).weights(tokens).tolist()
    assert found == pytest.approx([min(math.exp(max(-20, min(20, lp - mu))), cap) for lp, mu in pairs], rel=1e-12)
    assert max(found) <= cap


@pytest.mark.parametrize("correction", [NoCorrection(), TruncatedImportanceSampling()])
def test_p7_what_was_drawn_from_the_trained_weights_weighs_one(correction: NoCorrection) -> None:
    tokens = sampled([-1.0, -7.0], [-1.0, -7.0], fresh=True)
    assert (torch.ones(2) * correction.weights(tokens)).tolist() == [1.0, 1.0]
    assert correction.old_logprobs(tokens).tolist() == [-1.0, -7.0]


def test_without_a_correction_older_tokens_are_compared_with_what_was_recorded() -> None:
    tokens = sampled([-1.0], [-2.0])
    assert NoCorrection().old_logprobs(tokens).tolist() == [-2.0]
    assert TruncatedImportanceSampling().old_logprobs(tokens).tolist() == [-1.0]


def test_it_tells_how_much_it_weighs_and_how_often_it_truncates() -> None:
    weight, _, truncated, *_ = TruncatedImportanceSampling(cap=2.0).measured(sampled([-1.0, -1.0], [-2.0, -0.5]))
    assert weight.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert truncated.tolist() == [1.0, 0.0]


def test_a_correction_is_chosen_by_its_type() -> None:
    read = TypeAdapter[CorrectionSettings](CorrectionSettings).validate_python
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
            await trainer.accumulate(MicroBatch(micro_batch_id=f"mb/{number}", policy=SOLVER, samples=part))
        await trainer.step(divisors_of(samples))
        assert trainer.last_update is not None
        return weights_of(model), trainer.last_update

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
    with DoubleStays():
        expected = naive_update(make_model(dtype=torch.float64), samples, cap)
    found, _ = update(make_model(), samples, TruncatedImportanceSampling(cap=cap))
    assert float((found - expected).norm() / expected.norm()) <= 1e-10


def test_every_loss_is_corrected_alike_because_a_step_has_one_update(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(5, version=1)
    ppo, _ = update(make_model(), samples, TruncatedImportanceSampling(), Ppo())
    reinforce, _ = update(make_model(), samples, TruncatedImportanceSampling(), Reinforce())
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
