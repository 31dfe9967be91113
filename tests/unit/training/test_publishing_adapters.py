"""A policy that publishes its adapter alone, and the engine that serves it as the merged weights would be."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.config.run_settings import PolicySettings
from flexmarl.errors import EngineError, TrainingError
from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, PublishedAdapter, TensorTree, checksum, names_checksum, weights_key
from flexmarl.records import Generation, GenerationRequest, MicroBatch, PolicyName, Sample, Sampling, Version
from flexmarl.testing.inference import check_inference_engine
from flexmarl.testing.training import sample_of
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

SOLVER = PolicyName("solver")
Model = Callable[..., PreTrainedModel]
Samples = Callable[..., list[Sample]]


def trainer_of(make_model: Model, make_samples: Samples, updates: int, **more: Any) -> SingleProcessTrainer:
    """A trainer with an adapter, after so many updates."""
    keys = {"dtype": "float32", "lora": {"rank": 4, "alpha": 6}, "optimizer": {"learning_rate": 1e-2}}
    settings = TrainingSettings.model_validate(keys | more)
    trainer = SingleProcessTrainer(SOLVER, make_model(), settings, InlineObjectStore(), seed=5)

    async def train() -> None:
        for number in range(updates):
            samples = make_samples(number, version=number)
            await trainer.accumulate_batch(MicroBatch(micro_batch_id="mb", policy=SOLVER, samples=tuple(samples)))
            await trainer.step(divisors_of(samples))

    asyncio.run(train())
    return trainer


async def object_of(trainer: SingleProcessTrainer) -> tuple[TensorTree, Checksum]:
    """What a trainer publishes, and the checksum that it says."""
    objects = InlineObjectStore()
    trainer._objects = objects
    said = await trainer.publish(trainer.version)
    return await objects.get(weights_key(SOLVER, trainer.version)), said


def published(trainer: SingleProcessTrainer) -> tuple[TensorTree, Checksum]:
    return asyncio.run(object_of(trainer))


def both(make_model: Model, make_samples: Samples, updates: int, **more: Any) -> tuple[TensorTree, TensorTree]:
    """What equal trainers publish: (merged, adapter)."""
    merged, adapter = (
        published(trainer_of(make_model, make_samples, updates, publish=publish, **more))[0]
        for publish in ("merged", "adapter")
    )
    return merged, adapter


def core_of(model: PreTrainedModel, **more: Any) -> EngineCore:
    return EngineCore(model, EmbeddedSettings(slots=4, max_len=64, **more))


def ask(seed: int, max_tokens: int = 12) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(seed), policy=SOLVER, prompt_ids=np.arange(1, 6, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens), seed=seed,
    )  # fmt: skip


def answers(core: EngineCore, seeds: Sequence[int] = range(4), before: int = 0) -> list[Generation]:
    for seed in seeds:
        core.add(ask(seed))
    found = [generation for _ in range(before) for generation in core.step()]
    while not core.idle:
        found += core.step()
    return sorted(found, key=lambda generation: generation.request_id)


TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Of log-probabilities: the same sums in another order, or rounded to eight bits at other places."""


def assert_agree(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    """The same tokens, with log-probabilities that differ by the order of sums."""
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=TOLERANCE["float32"])


def assert_equal(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert np.array_equal(one.raw_logprobs, other.raw_logprobs)


def errors(trainer: SingleProcessTrainer, core: EngineCore) -> np.ndarray:
    """Differences between the engine's log-probabilities of the tokens that it samples, and the trainer's."""
    requests = [ask(seed) for seed in range(12)]
    generations = {generation.request_id: generation for generation in answers(core, range(12))}
    samples = [sample_of(request, generations[request.request_id]) for request in requests]
    batch = MicroBatch(micro_batch_id="asked", policy=SOLVER, samples=tuple(samples))
    computed = np.concatenate(asyncio.run(trainer.logprobs(batch)))
    return np.concatenate([sample.turn.raw_logprobs for sample in samples]) - computed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_adapter_an_engine_has_the_trainers_log_probabilities_no_further_off_than_with_merged_weights(
    make_model: Model, make_samples: Samples, dtype: str
) -> None:
    off: dict[str, np.ndarray] = {}
    for publish in ("merged", "adapter"):
        trainer = trainer_of(make_model, make_samples, 3, publish=publish, dtype=dtype)
        core = core_of(make_model(), dtype=dtype)
        core.load(Version(3), published(trainer)[0])
        off[publish] = np.abs(errors(trainer, core))
    print({publish: (found.mean(), found.max()) for publish, found in off.items()})
    assert off["adapter"].max() <= TOLERANCE[dtype]
    assert off["adapter"].mean() <= 1.5 * off["merged"].mean() + 1e-7


def test_an_adapter_and_the_weights_that_it_merges_to_sample_the_same_tokens(
    make_model: Model, make_samples: Samples
) -> None:
    whole, small = core_of(make_model()), core_of(make_model())
    for version in (0, 1, 3, 2):
        merged, adapter = both(make_model, make_samples, version)
        whole.load(Version(version), merged)
        small.load(Version(version), adapter)
        assert_agree(answers(small), answers(whole))


def test_deterministic_an_adapter_gives_a_request_the_same_bits_in_any_batch(
    make_model: Model, make_samples: Samples
) -> None:
    _, adapter = both(make_model, make_samples, 3)
    core = EngineCore(make_model(), EmbeddedSettings(slots=5, max_len=64), deterministic=True)
    core.load(Version(3), adapter)
    alone = [answers(core, [seed])[0] for seed in range(9)]
    for batch in ([8, 7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6], [1, 8]):
        assert_equal(answers(core, batch), [alone[seed] for seed in sorted(batch)])


def test_it_is_far_smaller_and_holds_nothing_of_the_base(make_model: Model, make_samples: Samples) -> None:
    merged, adapter = both(make_model, make_samples, 1, lora={"rank": 1})
    sizes = [sum(tensor.nbytes for tensor in tree.values()) for tree in (merged, adapter)]
    print(f"merged {sizes[0]} bytes, adapter {sizes[1]} bytes")
    assert sizes[1] < sizes[0] / 5
    assert not adapter.keys() & merged.keys()


def test_the_checksum_is_of_the_adapter_and_the_base_as_the_engine_holds_them(
    make_model: Model, make_samples: Samples
) -> None:
    tree, said = published(trainer_of(make_model, make_samples, 2, publish="adapter"))
    assert said == checksum(tree)
    core = core_of(make_model())
    assert core.load(Version(1), tree) == said
    assert core.load(Version(2), tree) == said, "over the base, not over the adapter before"


def test_with_verify_names_only_names_and_shapes_of_the_base_are_compared(
    make_model: Model, make_samples: Samples
) -> None:
    tree, said = published(trainer_of(make_model, make_samples, 1, publish="adapter"))
    core = EngineCore(make_model(), EmbeddedSettings(slots=4, max_len=64), verify="names")
    assert core.load(Version(1), tree) == names_checksum(tree) == said.partition(":")[0]


def test_an_adapter_of_another_base_or_for_other_layers_changes_nothing(
    make_model: Model, make_samples: Samples
) -> None:
    tree, _ = published(trainer_of(make_model, make_samples, 1, publish="adapter"))
    adapter = PublishedAdapter.from_tree(tree)
    assert adapter is not None
    core = core_of(make_model())
    before = answers(core)
    (layer, (a, b)), *_ = adapter.layers.items()
    misfits = [
        (PublishedAdapter(adapter.layers, adapter.scaling, Checksum("ab:cd")), "is of a base with checksum ab:cd"),
        (PublishedAdapter({"nowhere": (a, b)}, 1.0, adapter.base), "no linear layer 'nowhere'"),
        (PublishedAdapter({"model.norm": (a, b)}, 1.0, adapter.base), "no linear layer 'model.norm'"),
        (PublishedAdapter({layer: (a[:, 1:], b)}, 1.0, adapter.base), "but the adapter's A and B for it are"),
        (PublishedAdapter({layer: (a.double(), b.double())}, 1.0, adapter.base), "float32, but the adapter's"),
    ]
    for misfit, complaint in misfits:
        with pytest.raises(EngineError, match=complaint):
            core.load(Version(1), misfit.as_tree())
    assert_equal(answers(core), before)
    assert core.version == 0


def test_a_version_is_swapped_in_between_two_tokens_of_a_running_request(
    make_model: Model, make_samples: Samples
) -> None:
    merged, adapter = both(make_model, make_samples, 2)
    found: list[Generation] = []
    for tree in (merged, adapter):
        core = core_of(make_model())
        core.add(ask(7, max_tokens=20))
        for _ in range(6):
            core.step()
        core.load(Version(2), tree)
        found += answers(core, ())
    assert_agree(found[1:], found[:1])
    assert [(run.start, run.version) for run in found[1].versions] == [(0, 0), (6, 2)]


def test_asleep_it_keeps_the_adapter_and_takes_another_one(make_model: Model, make_samples: Samples) -> None:
    (first, adapter), (second, other) = (both(make_model, make_samples, updates) for updates in (1, 2))
    core, expected = core_of(make_model()), core_of(make_model())
    core.load(Version(1), adapter)
    expected.load(Version(1), first)
    core.sleep()
    core.wake()
    assert_agree(answers(core), answers(expected))
    core.sleep()
    core.load(Version(2), other)
    core.wake()
    expected.load(Version(2), second)
    assert_agree(answers(core), answers(expected))


def test_layers_that_the_next_adapter_leaves_out_are_the_base_again(make_model: Model, make_samples: Samples) -> None:
    everywhere = both(make_model, make_samples, 1)[1]
    merged, fewer = both(make_model, make_samples, 1, lora={"rank": 2, "target_modules": ["q_proj"]})
    core, expected = core_of(make_model()), core_of(make_model())
    core.load(Version(1), everywhere)
    core.load(Version(2), fewer)
    expected.load(Version(2), merged)
    assert_agree(answers(core), answers(expected))


def test_whole_weights_replace_the_base_and_an_adapter_of_the_old_one_is_refused(
    make_model: Model, make_samples: Samples
) -> None:
    merged, adapter = both(make_model, make_samples, 1)
    core = core_of(make_model())
    core.load(Version(1), adapter)
    assert core.load(Version(2), merged) == checksum(merged)
    with pytest.raises(EngineError, match="is of a base with checksum"):
        core.load(Version(3), adapter)


def test_its_tensors_are_an_object_and_an_object_is_its_tensors() -> None:
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    adapter = PublishedAdapter({"layer": (a, b)}, 0.7, Checksum("ab:cd"))
    found = PublishedAdapter.from_tree(adapter.as_tree())
    assert found is not None
    assert (found.scaling, found.base, list(found.layers)) == (0.7, "ab:cd", ["layer"])
    assert all(torch.equal(x, y) for x, y in zip(found.layers["layer"], (a, b), strict=True))
    assert PublishedAdapter.from_tree({"layer.weight": a}) is None


@pytest.mark.parametrize(
    ("training", "engine", "expected"),
    [
        ({"lora": {"rank": 4}}, EmbeddedSettings(), "adapter"),
        ({"lora": {"rank": 4}, "publish": "merged"}, EmbeddedSettings(), "merged"),
        ({"lora": {"rank": 4}}, SimpleNamespace(type="whole_weights_only"), "merged"),
        ({}, EmbeddedSettings(), "merged"),
    ],
)
def test_by_default_the_adapter_is_published_alone_where_the_engine_takes_it(
    training: dict[str, Any], engine: Any, expected: str
) -> None:
    policy = PolicySettings.model_validate({"model": "here", "training": training})
    policy = policy.model_copy(update={"engine": engine}).publishing()
    assert policy.training.publish == expected
    assert policy.publishing() is policy


def test_what_the_settings_of_the_embedded_engine_say_is_what_it_reports(make_model: Model) -> None:
    thread = DeviceThread("adapter")
    parts = EngineParts(policy=SOLVER, make_model=make_model, decode=str, store=InlineObjectStore(), thread=thread)

    async def reported() -> bool:
        engine = make_engine(EmbeddedSettings(slots=2, max_len=16), parts)
        return (await engine.capabilities()).adapters

    assert asyncio.run(reported()) is EmbeddedSettings.takes_adapters
    thread.close()


def test_the_base_is_read_with_its_first_adapter_and_again_after_whole_weights(
    make_model: Model, make_samples: Samples
) -> None:
    merged, adapter = both(make_model, make_samples, 1)
    broken = make_model()
    with torch.no_grad():
        broken.model.norm.weight[0] += 1
    for load_whole in (False, True):
        core = core_of(make_model() if load_whole else broken)
        if load_whole:
            core.load(Version(1), adapter)
            core.load(Version(2), {**merged, "model.norm.weight": broken.model.norm.weight.detach()})
        with pytest.raises(EngineError, match="the adapter is of a base with checksum"):
            core.load(Version(3), adapter)


def test_an_adapter_without_lora_is_refused() -> None:
    with pytest.raises(ValidationError, match="publish is 'adapter', but lora is null"):
        TrainingSettings.model_validate({"publish": "adapter"})


@pytest.mark.parametrize("number", [float("nan"), 1e30])
def test_an_adapter_that_would_merge_to_what_is_not_finite_is_not_published(
    make_model: Model, make_samples: Samples, number: float
) -> None:
    trainer = trainer_of(make_model, make_samples, 1, publish="adapter")
    for name, parameter in trainer._network.model.named_parameters():
        if "q_proj.lora_" in name:
            parameter.data.fill_(number)
    with pytest.raises(TrainingError, match="with the adapter these weights are not finite"):
        published(trainer)


def test_the_embedded_engine_keeps_the_contract_with_adapters(make_model: Model, make_samples: Samples) -> None:
    tree, _ = published(trainer_of(make_model, make_samples, 1, publish="adapter"))

    async def main() -> None:
        store, thread = InlineObjectStore(), DeviceThread("adapter")
        parts = EngineParts(policy=SOLVER, make_model=make_model, decode=str, store=store, thread=thread)

        async def publish(version: Version) -> Checksum:
            return (await store.set(weights_key(SOLVER, version), tree)).checksum

        async def make() -> Any:
            return make_engine(EmbeddedSettings(slots=8, max_len=96), parts)

        await check_inference_engine(make, policy=SOLVER, publish_adapter=publish)
        thread.close()

    asyncio.run(main())
