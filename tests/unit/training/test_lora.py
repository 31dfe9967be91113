"""The trainer with an adapter, against peft used plainly, and against the contract of every trainer."""

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import CheckpointError, ConfigError
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore, weights_key
from flexmarl.records import GenerationRequest, MicroBatch, PolicyName, Sample, Sampling, Version
from flexmarl.testing.training import check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends import network
from flexmarl.training.backends.causal_lm import KeepFloat64, unique_tensors
from flexmarl.training.backends.network import Adapter
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import RowReader
from flexmarl.training.settings import LoraSettings, TrainingSettings

SOLVER = PolicyName("solver")
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
Tensors = dict[str, torch.Tensor]


def chosen(**more: Any) -> TrainingSettings:
    keys = {"dtype": "float64", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"learning_rate": 1e-2}}
    return TrainingSettings.model_validate(keys | more)


def micro_batches(*parts: Sequence[Sample]) -> list[MicroBatch]:
    return [MicroBatch(micro_batch_id=f"mb/{i}", policy=SOLVER, samples=tuple(p)) for i, p in enumerate(parts)]


def trained(
    model: PreTrainedModel, settings: TrainingSettings, steps: Sequence[Sequence[Sample]], split: int = 3
) -> SingleProcessTrainer:
    """A trainer after one update per step, each from two micro-batches."""
    trainer = SingleProcessTrainer(SOLVER, model, settings, InlineObjectStore(), seed=5)

    async def train() -> None:
        for samples in steps:
            for batch in micro_batches(samples[:split], samples[split:]):
                await trainer.accumulate_batch(batch)
            await trainer.step(divisors_of(samples))

    asyncio.run(train())
    return trainer


def published(trainer: SingleProcessTrainer) -> Tensors:
    objects = InlineObjectStore()
    trainer._objects, trainer._published_as = objects, None  # A store in which it has set nothing.

    async def publish() -> Tensors:
        await trainer.publish(trainer.version)
        tree = await objects.get(weights_key(SOLVER, trainer.version))
        return {name: tensor.clone() for name, tensor in tree.items()}

    return asyncio.run(publish())


def parts(model: PreTrainedModel) -> tuple[Tensors, Tensors]:
    """(adapter, base): copies of the model's parameters."""
    both: tuple[Tensors, Tensors] = ({}, {})
    for name, parameter in model.named_parameters():
        both[".lora_" not in name][name] = parameter.detach().clone()
    return both


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_it_keeps_the_contract_of_a_trainer(
    make_model: Model, make_samples: Samples, tmp_path: Path, dtype: str
) -> None:
    samples, thread = make_samples(14, 8), DeviceThread("trainer under test")

    def make(objects: ObjectStore, rows: RowReader) -> SingleProcessTrainer:
        return SingleProcessTrainer(SOLVER, make_model(), chosen(dtype=dtype), objects, thread=thread, rows=rows)

    try:
        asyncio.run(check_trainer(make, micro_batches(samples[:5], samples[5:]), tmp_path))
    finally:
        thread.close()


def test_a_new_adapter_changes_no_bit_of_what_is_published(make_model: Model) -> None:
    found, base = published(trained(make_model(), chosen(dtype="float32"), [])), make_model()
    assert list(found) == [name for name, _ in unique_tensors(base)]
    assert all(torch.equal(found[name], tensor) for name, tensor in unique_tensors(base))


def test_x2_only_the_adapter_learns(make_model: Model, make_samples: Samples) -> None:
    model, before = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    trained(model, chosen(), [make_samples(i, version=i) for i in range(3)])
    adapter, base = parts(model)
    assert all(torch.equal(base[name], p) for name, p in unwrapped(before, base).items())
    assert all(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)


def unwrapped(model: PreTrainedModel, base: Tensors) -> Tensors:
    """The parameters of an unwrapped model by the names of a wrapped one."""
    plain = dict(model.named_parameters())
    return {name: plain[name.replace(".base_layer", "")] for name in base}


def test_the_seed_alone_decides_how_an_adapter_begins(make_model: Model) -> None:
    models = [make_model() for _ in range(3)]
    state = torch.random.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        Adapter(model, LoraSettings(rank=2), seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state), "no other random stream is moved on"
        torch.rand(1)
        state = torch.random.get_rng_state()
    first, again, other = (torch.cat([p.flatten() for p in parts(model)[0].values()]) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_its_updates_are_those_of_peft_used_plainly(make_model: Model, make_samples: Samples, targets: Any) -> None:
    steps = [make_samples(seed, 5, version=version) for version, seed in enumerate((30, 31, 32))]
    model = make_model()
    settings = chosen(lora={"rank": 3, "alpha": 5, "target_modules": targets}, max_tokens_per_forward=40)
    begun = deepcopy(model)
    Adapter(begun, LoraSettings(rank=3, alpha=5, target_modules=targets), seed=5)
    trained(model, settings, steps)

    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets if targets == "all-linear" else list(targets))
    plain = get_peft_model(make_model(dtype=torch.float64), config)
    for name, tensor in parts(begun)[0].items():
        plain.get_parameter(f"base_model.model.{name}").data = tensor.double()
    naive_full_batch(plain, steps)
    found = torch.cat([p.flatten() for p in parts(model)[0].values()])
    expected = torch.cat([plain.get_parameter(f"base_model.model.{name}").flatten() for name in parts(model)[0]])
    assert relative(found, expected) <= 1e-10
    assert relative(expected, torch.cat([p.double().flatten() for p in parts(begun)[0].values()])) > 1e-3


def naive_full_batch(model: PeftModel, steps: Sequence[Sequence[Sample]]) -> None:
    """Strictly on-policy token-mean, row by row without padding, on PyTorch's plain AdamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, foreach=False, fused=False)
    for samples in steps:
        total = torch.zeros((), dtype=torch.float64)
        for sample in (s for s in samples if s.num_tokens):
            n, ids = sample.num_tokens, torch.tensor([*sample.turn.prompt_ids, *sample.turn.response_ids]).long()
            with KeepFloat64():
                logprobs = model(input_ids=ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
            total = total - sample.weight * sample.advantage * logprobs[torch.arange(n), ids[-n:]].sum()
        optimizer.zero_grad()
        (total / sum(s.weight * s.num_tokens for s in samples)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_it_publishes_what_peft_merges(make_model: Model, make_samples: Samples, tmp_path: Path, dtype: str) -> None:
    settings = chosen(dtype=dtype, lora={"rank": 4, "alpha": 6, "export": "adapter"})
    trainer = trained(make_model(), settings, [make_samples(i, version=i) for i in range(2)])
    asyncio.run(trainer.export(tmp_path))
    base = make_model(dtype=getattr(torch, dtype))
    merged = PeftModel.from_pretrained(base, str(tmp_path), autocast_adapter_dtype=False).merge_and_unload()
    found = published(trainer)
    assert found.keys() == dict(unique_tensors(merged)).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in unique_tensors(merged))
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], make_model().model.layers[0].mlp.up_proj.weight)


def test_publishing_leaves_the_base_as_it_is_and_repeats_bit_for_bit(make_model: Model, make_samples: Samples) -> None:
    model = make_model()
    trainer = trained(model, chosen(dtype="float32"), [make_samples(1)])
    base = parts(model)[1]
    first, second = published(trainer), published(trainer)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(base[name], tensor) for name, tensor in parts(model)[1].items())


def test_the_engine_serves_what_the_trainer_sees(make_model: Model, make_samples: Samples) -> None:
    trainer = trained(make_model(), chosen(dtype="float32"), [make_samples(i, version=i) for i in range(3)])
    samples = make_samples(40, weights=(1.0,), empty=0.0)
    served = asyncio.run(generated(make_model(), published(trainer), samples))
    for sample, generation in zip(samples, served, strict=True):
        turn = sample.turn
        object.__setattr__(turn, "response_ids", generation.response_ids)
        object.__setattr__(turn, "raw_logprobs", generation.raw_logprobs)
    (batch,) = micro_batches(samples)
    for sample, seen in zip(samples, asyncio.run(trainer.logprobs(batch)), strict=True):
        assert seen == pytest.approx(sample.turn.raw_logprobs, abs=2e-6)


async def generated(model: PreTrainedModel, weights: Tensors, samples: Sequence[Sample]) -> list[Any]:
    """What an engine that began with `model` answers to the samples' prompts with the weights."""
    store, thread = InlineObjectStore(), DeviceThread("engine under test")
    await store.set(weights_key(SOLVER, Version(3)), weights)
    parts = EngineParts(
        policy=SOLVER, make_model=lambda: model, decode=str, store=store, thread=thread, deterministic=False
    )
    requests = [
        GenerationRequest(
            request_id=str(i), policy=SOLVER, prompt_ids=s.turn.prompt_ids, sampling=Sampling(max_tokens=6), seed=i
        )
        for i, s in enumerate(samples)
    ]
    try:
        async with make_engine(EmbeddedSettings(slots=8, max_len=64), parts) as engine:
            await engine.load_weights(SOLVER, Version(3))
            found = {answer.request_id: answer async for answer in engine.generate(requests)}
    finally:
        thread.close()
    return [found[request.request_id] for request in requests]


def test_the_reference_is_the_model_without_its_adapter(make_model: Model, make_samples: Samples) -> None:
    kl = {"where": "reward", "type": "k1"}
    model, samples = make_model(), make_samples(50, empty=0.0)
    initial = SingleProcessTrainer(SOLVER, make_model(), chosen(lora=None), InlineObjectStore())
    trainer = trained(model, chosen(kl=kl), [make_samples(i, version=i) for i in range(2)])
    (batch,) = micro_batches(samples)
    reference = [
        seen.reference for seen in asyncio.run(trainer.appraise_turns([sample.turn for sample in batch.samples]))
    ]
    expected = asyncio.run(initial.logprobs(batch))
    assert all(np.array_equal(a, b) for a, b in zip(reference, expected, strict=True))
    now = asyncio.run(trainer.logprobs(batch))
    assert not any(np.array_equal(a, b) for a, b in zip(now, expected, strict=True)), "the adapter is back on"
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


def test_with_an_adapter_the_reference_is_no_second_copy_of_the_weights(
    make_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[PreTrainedModel] = []
    monkeypatch.setattr(network, "FrozenCopy", copies.append)
    kl = {"where": "reward", "type": "k1"}
    for settings, count in ((chosen(kl=kl), 0), (chosen(lora=None), 0), (chosen(kl=kl, lora=None), 1)):
        SingleProcessTrainer(SOLVER, make_model(), settings, InlineObjectStore())
        assert len(copies) == count


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_divergence_from_the_reference_changes_nothing_before_the_first_update(
    make_model: Model, make_samples: Samples, where: str
) -> None:
    kept, free = make_model(), make_model()
    trained(kept, chosen(kl={"where": where, "coef": 0.5}), [make_samples(3)])
    trained(free, chosen(), [make_samples(3)])
    assert all(relative(parts(kept)[0][name], tensor) <= 1e-12 for name, tensor in parts(free)[0].items())


def test_activation_checkpointing_gives_the_same_update(make_model: Model, make_samples: Samples) -> None:
    plain, recomputing = make_model(), make_model()
    steps = [make_samples(11), make_samples(12, version=1)]
    trained(plain, chosen(), steps)
    trained(recomputing, chosen(activation_checkpointing=True), steps)
    assert all(relative(parts(recomputing)[0][name], tensor) <= 1e-12 for name, tensor in parts(plain)[0].items())


def test_any_split_gives_the_same_update(make_model: Model, make_samples: Samples) -> None:
    whole, split = make_model(), make_model()
    steps = [make_samples(21), make_samples(22, version=1)]
    trained(whole, chosen(), steps, split=0)
    trained(split, chosen(max_tokens_per_forward=1), steps, split=4)
    assert all(relative(parts(split)[0][name], tensor) <= 1e-10 for name, tensor in parts(whole)[0].items())


def test_a_checkpoint_holds_the_adapter_alone_and_does_not_fit_another_kind(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    trainer = trained(make_model(), chosen(), [make_samples(1)])
    asyncio.run(trainer.save(tmp_path))
    adapter = parts(trainer._network.model)[0]
    assert sum(p.nbytes for p in adapter.values()) <= (tmp_path / "weights.safetensors").stat().st_size < 40_000
    full = SingleProcessTrainer(SOLVER, make_model(), chosen(lora=None), InlineObjectStore())
    with pytest.raises(CheckpointError, match="is of another model: only one of the two has"):
        asyncio.run(full.load(tmp_path))


@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_both_exports_are_folders_that_transformers_loads(
    make_model: Model, make_samples: Samples, tmp_path: Path, export: str
) -> None:
    make_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = chosen(dtype="float32", lora={"rank": 2, "export": export})
    trainer = trained(model, settings, [make_samples(1)])
    asyncio.run(trainer.export(tmp_path / "out"))
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert ("model.safetensors" in names, "adapter_model.safetensors" in names) == (
        export == "merged",
        export == "adapter",
    )
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-6, rtol=0)
    assert relative(loaded(ids).logits, make_model()(ids).logits) > 1e-4


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("nothing",), "not found in the base model"),
        (("embed_tokens",), "'model.embed_tokens' is no linear layer"),
        (("q_proj", "lm_head"), "the head's weight is that of the embeddings too"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_targets_that_cannot_be_adapted_are_refused_by_name(make_model: Model, targets: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        Adapter(make_model(), LoraSettings(target_modules=targets), seed=0)
    assert f"training.lora.target_modules {targets!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"dropout": 0.1}, "dropout is 0.1, but the engine samples without it"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"rank": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        LoraSettings.model_validate(keys)
