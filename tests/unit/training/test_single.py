"""The trainer against a full-batch implementation that shares no code with it, and against its own contract."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectKey, ObjectStore
from flexmarl.records import Divisors, MicroBatch, PolicyName, Sample, Version
from flexmarl.testing.training import check_trainer
from flexmarl.training.aggregation import Aggregation, divisors_of
from flexmarl.training.backends.causal_lm import KeepFloat64
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import RowReader, UpdateReport
from flexmarl.training.losses import Ppo, ReinforceLoss
from flexmarl.training.settings import AdamWSettings, LoraSettings, TrainingSettings

SOLVER = PolicyName("solver")
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
DOUBLE = TrainingSettings(dtype="float64", optimizer=AdamWSettings(learning_rate=1e-2, weight_decay=0.1))


def trainer_of(model: PreTrainedModel, chosen: TrainingSettings = DOUBLE, **more: Any) -> SingleProcessTrainer:
    return SingleProcessTrainer(SOLVER, model, chosen, InlineObjectStore(), **more)


def micro_batches(parts: Sequence[Sequence[Sample]], prefix: str = "mb") -> list[MicroBatch]:
    return [MicroBatch(micro_batch_id=f"{prefix}/{i}", policy=SOLVER, samples=tuple(p)) for i, p in enumerate(parts)]


async def feed(trainer: SingleProcessTrainer, *parts: Sequence[Sample]) -> None:
    for batch in micro_batches(parts):
        await trainer.accumulate_batch(batch)


def weights_of(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def updated_weights(model: PreTrainedModel, chosen: TrainingSettings, *parts: Sequence[Sample]) -> torch.Tensor:
    async def one_update() -> torch.Tensor:
        trainer = trainer_of(model, chosen)
        await feed(trainer, *parts)
        await trainer.step(divisors_of(s for part in parts for s in part))
        return weights_of(model)

    return asyncio.run(one_update())


def naive_full_batch(model: PreTrainedModel, steps: Sequence[Sequence[Sample]]) -> torch.Tensor:
    """Token-mean PPO, row by row without padding, on PyTorch's plain AdamW; versions count the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False, fused=False)
    for version, samples in enumerate(steps):
        total, tokens = torch.zeros((), dtype=torch.float64), 0.0
        for sample in samples:
            turn, n = sample.turn, sample.num_tokens
            tokens += sample.weight * n
            if not n:
                continue
            ids = torch.tensor([*turn.prompt_ids, *turn.response_ids], dtype=torch.long)
            logits = model(input_ids=ids[None]).logits[0, -n - 1 : -1]
            logprobs = logits.log_softmax(-1)[torch.arange(n), ids[-n:]]
            old = logprobs.detach() if turn.version == version else torch.from_numpy(turn.raw_logprobs).double()
            for lp, mu in zip(logprobs, old, strict=True):
                rho = (lp - mu).exp()
                loss = torch.maximum(-sample.advantage * rho, -sample.advantage * rho.clamp(0.8, 1.28))
                if sample.advantage < 0:
                    loss = loss.clamp(max=-sample.advantage * 3.0)
                total = total + sample.weight * loss
        optimizer.zero_grad()
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights_of(model)


@given(seed=st.integers(0, 10_000), max_tokens=st.sampled_from([1, 64, 10_000]))
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_law_2_any_order_and_split_gives_the_full_batch_weights(
    make_model: Model, make_samples: Samples, seed: int, max_tokens: int
) -> None:
    # Sampled at versions 0, 0, 2: the second step's are one version old, so recorded log-probabilities and clips act.
    steps = [make_samples(seed + i, 4, version=version) for i, version in enumerate((0, 0, 2))]
    assume(all(divisors_of(samples) != Divisors() for samples in steps))
    random = np.random.default_rng(seed)

    async def streamed() -> torch.Tensor:
        model = make_model()
        trainer = trainer_of(model, DOUBLE.model_copy(update={"max_tokens_per_forward": max_tokens}))
        for samples in steps:
            order = [samples[i] for i in random.permutation(len(samples))]
            edges = [0, *sorted(random.integers(0, len(order) + 1, random.integers(0, 4))), len(order)]
            await feed(trainer, *(order[a:b] for a, b in pairwise(edges)))
            await trainer.step(divisors_of(samples))
        return weights_of(model)

    with KeepFloat64():
        expected = naive_full_batch(make_model(dtype=torch.float64), steps)
    assert relative(asyncio.run(streamed()), expected) <= 1e-10


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_a1_every_aggregation_is_independent_of_the_split(
    make_model: Model, make_samples: Samples, mode: Aggregation
) -> None:
    chosen = DOUBLE.model_copy(
        update={"loss": Ppo(aggregation=mode, horizon_tokens=9 if mode == "seq-mean-token-sum-norm" else None)}
    )
    samples = make_samples(3)
    whole = updated_weights(make_model(), chosen, samples)
    split = updated_weights(make_model(), chosen, samples[5:], [], samples[:2], samples[2:5])
    assert relative(split, whole) <= 1e-12
    assert relative(whole, weights_of(make_model())) > 1e-3


@pytest.mark.parametrize("kappa", [1e-6, 1 / 96, 1e5])
def test_a5_a_deferred_divisor_equals_a_known_one(make_model: Model, make_samples: Samples, kappa: float) -> None:
    samples = make_samples(4)
    scaled = DOUBLE.model_copy(update={"accumulation_scale": kappa})
    known = updated_weights(make_model(), DOUBLE, samples)
    assert relative(updated_weights(make_model(), scaled, samples[:4], samples[4:]), known) <= 1e-12


def test_a3_a_longer_row_in_the_batch_pads_the_others_without_effect(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(5, weights=(1.0,), zero_advantages=0.0)
    together = updated_weights(make_model(), DOUBLE, samples)
    alone = updated_weights(make_model(), DOUBLE.model_copy(update={"max_tokens_per_forward": 1}), samples)
    assert relative(together, alone) <= 1e-12


def test_a6_policies_trained_in_turns_equal_policies_trained_alone(make_model: Model, make_samples: Samples) -> None:
    mine, other = make_samples(6), make_samples(7)

    async def in_turns() -> torch.Tensor:
        model = make_model()
        first, second = trainer_of(model), trainer_of(make_model(1))
        for i in range(0, max(len(mine), len(other)), 3):
            for trainer, samples in ((first, mine), (second, other)):
                for batch in micro_batches([samples[i : i + 3]], prefix=f"at {i}"):
                    await trainer.accumulate_batch(batch)
        await second.step(divisors_of(other))
        await first.step(divisors_of(mine))
        return weights_of(model)

    assert relative(asyncio.run(in_turns()), updated_weights(make_model(), DOUBLE, mine)) <= 1e-12


@pytest.mark.parametrize("loss", [Ppo(), ReinforceLoss()])
def test_skipping_rows_of_advantage_zero_is_exact(make_model: Model, make_samples: Samples, loss: Ppo) -> None:
    samples = make_samples(8, zero_advantages=0.6)
    skipping = DOUBLE.model_copy(update={"loss": loss})
    forwarding = skipping.model_copy(update={"skip_zero_advantage": False})
    skipped = updated_weights(make_model(), skipping, samples)
    assert relative(skipped, updated_weights(make_model(), forwarding, samples)) <= 1e-13
    assert any(s.advantage == 0 and s.num_tokens and s.weight for s in samples), "the test needs a row to skip"


def test_a_batch_of_zero_advantages_is_an_update_with_gradient_zero(make_model: Model, make_samples: Samples) -> None:
    async def check() -> None:
        trainer = trainer_of(make_model())
        samples = make_samples(9, zero_advantages=1.0, weights=(1.0,))
        await feed(trainer, samples)
        update = await trainer.step(divisors_of(samples))
        assert update.version == 1
        assert update.grad_norm == 0.0

    asyncio.run(check())


def test_nan_recorded_for_a_row_that_is_not_trained_does_no_harm(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(10, version=-1)
    for sample in samples:
        if sample.weight == 0 or sample.advantage == 0:
            sample.turn.raw_logprobs[:] = np.nan
    assert updated_weights(make_model(), DOUBLE, samples).isfinite().all()


def test_activation_checkpointing_gives_the_same_update(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(11)
    recomputing = DOUBLE.model_copy(update={"activation_checkpointing": True})
    plain = updated_weights(make_model(), DOUBLE, samples)
    assert relative(updated_weights(make_model(), recomputing, samples), plain) <= 1e-13


def test_bfloat16_keeps_updates_that_its_weights_cannot_show(make_model: Model, make_samples: Samples) -> None:
    chosen = TrainingSettings(dtype="bfloat16", optimizer=AdamWSettings(learning_rate=1e-6))

    async def check() -> None:
        model = make_model()
        before = weights_of(make_model(dtype=torch.bfloat16))
        trainer = trainer_of(model, chosen)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        for version in range(3):
            samples = make_samples(12, version=version)
            await feed(trainer, samples)
            await trainer.step(divisors_of(samples))
        masters = torch.cat([m.flatten().double() for m in trainer._updater.masters.values()])
        assert 0 < (masters - before).abs().max() < 1e-5
        logprobs = await trainer.logprobs(micro_batches([samples])[0])
        assert all(np.isfinite(row).all() for row in logprobs)

    asyncio.run(check())


def test_logprobs_are_those_of_the_model_on_each_row_alone(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(13)
    found = asyncio.run(trainer_of(make_model()).logprobs(micro_batches([samples])[0]))
    model = make_model(dtype=torch.float64)
    for sample, values in zip(samples, found, strict=True):
        n = sample.num_tokens
        ids = torch.tensor([*sample.turn.prompt_ids, *sample.turn.response_ids], dtype=torch.long)
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        expected = [logprobs[len(ids) - n + t - 1, ids[len(ids) - n + t]].item() for t in range(n)]
        assert values.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_it_keeps_the_contract_of_a_trainer(
    make_model: Model, make_samples: Samples, tmp_path: Path, dtype: str
) -> None:
    samples = make_samples(14, 8)
    chosen = TrainingSettings.model_validate({"dtype": dtype, "optimizer": {"learning_rate": 1e-2}})
    thread = DeviceThread("trainer under test")

    def make(objects: ObjectStore, rows: RowReader) -> SingleProcessTrainer:
        return SingleProcessTrainer(SOLVER, make_model(), chosen, objects, thread=thread, rows=rows)

    try:
        asyncio.run(check_trainer(make, micro_batches([samples[:5], samples[5:]]), tmp_path))
    finally:
        thread.close()


def test_a_run_that_was_saved_and_restored_ends_bit_equal(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    steps = [make_samples(20 + version, version=version) for version in range(4)]

    async def train(trainer: SingleProcessTrainer, todo: Sequence[Sequence[Sample]]) -> list[UpdateReport]:
        updates: list[UpdateReport] = []
        for samples in todo:
            await feed(trainer, samples[:4], samples[4:])
            updates.append(await trainer.step(divisors_of(samples)))
        return updates

    async def check() -> None:
        chosen = TrainingSettings.model_validate(
            {"optimizer": {"learning_rate": 1e-2}, "schedule": {"type": "linear", "decay_steps": 5, "warmup_steps": 1}}
        )
        undisturbed, resumed = make_model(), make_model(99)
        first = trainer_of(undisturbed, chosen)
        await train(first, steps[:2])
        await first.save(tmp_path / "step 2")
        update = await train(first, steps[2:])
        second = trainer_of(resumed, chosen)
        assert await second.load(tmp_path / "step 2") == 2
        again = await train(second, steps[2:])
        assert torch.equal(weights_of(resumed), weights_of(undisturbed))
        assert again == update

    asyncio.run(check())


def test_an_export_is_a_folder_that_transformers_loads(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    model = make_model()
    asyncio.run(trainer_of(model, TrainingSettings(), tokenizer=tokenizer).export(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 3


def test_it_publishes_the_state_dict_without_the_tied_head(make_model: Model) -> None:
    async def check() -> None:
        objects = InlineObjectStore()
        model = make_model()
        trainer = SingleProcessTrainer(SOLVER, model, TrainingSettings(), objects)
        await trainer.publish(Version(0))
        tree = await objects.get(ObjectKey("weights/solver/0"))
        assert set(tree) == set(model.state_dict()) - {"lm_head.weight"}

    asyncio.run(check())


def refused(error: type[Exception], match: str, call: Callable[[], Awaitable[object]]) -> None:
    async def check() -> None:
        with pytest.raises(error, match=match):
            await call()

    asyncio.run(check())


def test_a_gradient_that_is_not_finite_leaves_the_weights_and_names_the_policy(
    make_model: Model, make_samples: Samples
) -> None:
    model = make_model()
    trainer = trainer_of(model)
    samples = [Sample(turn=s.turn, advantage=float("inf")) for s in make_samples(15, empty=0.0)]

    async def step() -> None:
        await feed(trainer, samples)
        await trainer.step(divisors_of(samples))

    before = weights_of(model)
    refused(TrainingError, "policy 'solver' at version 0: gradient norm is nan", step)
    assert torch.equal(weights_of(model), before)


async def stepped_and_published(trainer: SingleProcessTrainer, samples: Sequence[Sample]) -> None:
    await trainer.step(divisors_of(samples))
    await trainer.publish(trainer.version)


@pytest.mark.parametrize(
    "chosen",
    [
        TrainingSettings(optimizer=AdamWSettings(learning_rate=1e38)),
        TrainingSettings(optimizer=AdamWSettings(learning_rate=1e38), dtype="bfloat16"),
        TrainingSettings(optimizer=AdamWSettings(learning_rate=1e18), lora=LoraSettings(rank=4, alpha=1e6)),
    ],
    ids=["float32", "bfloat16", "an adapter that is finite alone"],
)
def test_weights_that_an_update_ruins_are_neither_published_nor_saved(
    make_model: Model, make_samples: Samples, tmp_path: Path, chosen: TrainingSettings
) -> None:
    objects = InlineObjectStore()
    trainer = SingleProcessTrainer(SOLVER, make_model(), chosen, objects)
    samples = make_samples(15, empty=0.0)
    rate = f"training.optimizer.learning_rate, {chosen.optimizer.learning_rate:g}"

    async def run() -> None:
        await trainer.publish(Version(0))
        await trainer.save(tmp_path / "good")
        await feed(trainer, samples)
        with pytest.raises(TrainingError, match=rf"policy 'solver'.* not finite.*{re.escape(rate)}"):
            await stepped_and_published(trainer, samples)
        for version in (0, 1):
            with pytest.raises(TrainingError):
                await trainer.publish(Version(version))
        with pytest.raises(KeyError, match=r"there are: \['weights/solver/0'\]"):
            await objects.get(ObjectKey("weights/solver/1"))

    asyncio.run(run())


def test_a_ruined_trainer_does_nothing_until_it_has_loaded_good_weights(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    model, samples = make_model(), make_samples(15, empty=0.0)
    trainer = trainer_of(model, TrainingSettings(optimizer=AdamWSettings(learning_rate=1e38)))
    before = weights_of(model)

    async def run() -> None:
        await trainer.save(tmp_path / "good")
        await feed(trainer, samples)
        with pytest.raises(TrainingError, match="after update 1 these weights are not finite"):
            await trainer.step(divisors_of(samples))
        for ruined in (trainer.save(tmp_path / "bad"), trainer.export(tmp_path / "bad"), feed(trainer, samples)):
            with pytest.raises(TrainingError, match="not finite"):
                await ruined
        assert os.listdir(tmp_path) == ["good"]
        await trainer.load(tmp_path / "good")
        assert torch.equal(weights_of(model), before)
        await trainer.publish(Version(0))

    asyncio.run(run())


def test_a_checkpoint_with_weights_that_are_not_finite_is_refused_by_name(make_model: Model, tmp_path: Path) -> None:
    trainer = trainer_of(make_model())

    async def load() -> None:
        await trainer.save(tmp_path / "step-00001" / "solver")
        file = tmp_path / "step-00001" / "solver" / "weights.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, file)
        await trainer.load(tmp_path / "step-00001" / "solver")

    refused(CheckpointError, "model.norm.weight; remove", load)


def test_a_micro_batch_that_fails_half_way_adds_nothing(make_model: Model, make_samples: Samples) -> None:
    good, bad = make_samples(16), make_samples(17, weights=(1.0,), zero_advantages=0.0)
    broken = Sample(turn=bad[-1].turn, advantage=1.0)
    object.__setattr__(broken.turn, "prompt_ids", np.full(40, 10**6, dtype=np.int32))  # no such token; the longest row

    async def check() -> torch.Tensor:
        model = make_model()
        trainer = trainer_of(model, DOUBLE.model_copy(update={"max_tokens_per_forward": 1}))
        await feed(trainer, good)
        whole = MicroBatch(micro_batch_id="broken", policy=SOLVER, samples=(*bad[:-1], broken))
        with pytest.raises(TrainingError, match="accumulating micro-batch broken: IndexError"):
            await trainer.accumulate_batch(whole)
        await trainer.step(divisors_of(good))
        return weights_of(model)

    alone = updated_weights(make_model(), DOUBLE.model_copy(update={"max_tokens_per_forward": 1}), good)
    assert torch.equal(asyncio.run(check()), alone)


def test_it_refuses_another_policys_rows_and_another_models_checkpoint(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    trainer = trainer_of(make_model())
    foreign = MicroBatch(micro_batch_id="v/0/0", policy=PolicyName("verifier"), samples=tuple(make_samples(18)))
    refused(TrainingError, "policy 'verifier'", lambda: trainer.accumulate_batch(foreign))
    refused(CheckpointError, "loading .*nowhere", lambda: trainer.load(tmp_path / "nowhere"))


def drop_moment(state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    del state["optimizer"]["state"][1]["exp_avg_sq"]


def drop_parameter(state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    del state["optimizer"]["state"][0]


def reshape_moment(state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    of_first = state["optimizer"]["state"][0]
    of_first["exp_avg"] = of_first["exp_avg"].flatten()


def round_weights(state: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop_moment, "lacks the moment exp_avg_sq of parameter 1"),
        (drop_parameter, "lacks the moment exp_avg of parameter 0"),
        (reshape_moment, "exp_avg of parameter 0 is torch.float"),
        (round_weights, "model.norm.weight is torch.int32"),
    ],
)
def test_a_checkpoint_that_was_edited_is_refused_and_changes_nothing(
    make_model: Model, make_samples: Samples, tmp_path: Path, change: Callable[..., None], complaint: str
) -> None:
    async def saved() -> None:
        trainer = trainer_of(make_model())
        await feed(trainer, make_samples(18))
        await trainer.step(divisors_of(make_samples(18)))
        await trainer.save(tmp_path / "step")

    asyncio.run(saved())
    folder = tmp_path / "step"
    state, weights = torch.load(folder / "trainer.pt"), load_file(folder / "weights.safetensors")
    change(state, weights)
    torch.save(state, folder / "trainer.pt")
    save_file(weights, folder / "weights.safetensors")
    model = make_model(7)
    trainer, before = trainer_of(model), weights_of(model).clone()
    refused(CheckpointError, complaint, lambda: trainer.load(folder))
    assert torch.equal(weights_of(model), before)


def test_metrics_are_means_over_weighted_tokens(make_model: Model, make_samples: Samples) -> None:
    async def check() -> None:
        trainer = trainer_of(make_model())
        samples = make_samples(19, zero_advantages=0.0, version=-1)
        await feed(trainer, samples[:3], samples[3:])
        update = await trainer.step(divisors_of(samples))
        assert update is not None
        assert update.num_tokens == divisors_of(samples).num_tokens
        assert 0 <= update.means["clipped"] <= 1
        assert 0 < update.means["entropy"] < np.log(23)
        assert update.means["kl_to_sampler"] > 0
        assert update.learning_rate == 1e-2

    asyncio.run(check())
