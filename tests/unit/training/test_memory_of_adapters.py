"""Memory of several adapters on one base, counted from the tensors that live: a process's RSS is too noisy for it."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import PolicyName, Sample
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends import state
from flexmarl.training.backends.base_host import BaseHost
from flexmarl.training.backends.causal_lm import check_model_files
from flexmarl.training.backends.joint import JointPasses
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.backends.state import Base, Skeleton, bind
from flexmarl.training.interface import HeldRows
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.together import RowsOf

POLICIES = [PolicyName(name) for name in ("one", "two", "three", "four")]
RANK = 4
PER_NUMBER = 4 * 4
"""Bytes of a trained number in float32: weight, gradient sum and AdamW's two moments."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.2M parameters."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class CopyingBase(Base):
    """A mutant: every model has a copy of the base."""

    def model(self) -> PreTrainedModel:
        weights = {name: tensor.clone() for name, tensor in self.weights.items()}
        return bind(check_model_files(self.name[0]), weights, self._buffers)


def live_bytes() -> dict[int, int]:
    """Bytes of each storage that a tensor of this process has, by its address: views and ties count once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def resident(
    make_base: Callable[..., Base], source: Path, make_samples: Callable[..., list[Sample]]
) -> tuple[int, int, int]:
    """Bytes that four trainers in the middle of their second step add; those of the base; of the adapters' state."""
    before, rows = live_bytes(), HeldRows()
    settings = TrainingSettings.model_validate({"lora": {"rank": RANK}, "publish": "adapter", "kl": {"coef": 0.1}})
    base = make_base(source, settings.dtype, "cpu", Skeleton(source))
    trainers = {
        policy: SingleProcessTrainer(policy, base.model(), settings, InlineObjectStore(), rows=rows, seed=number)
        for number, policy in enumerate(POLICIES)
    }
    passes = JointPasses(base.model(), settings, device="cpu", deterministic=False)
    host = BaseHost(trainers, passes, rows)

    async def train() -> None:
        for step in range(2):
            waiting = []
            for policy in POLICIES:  # One after the other holds the rows: their ids are the same.
                rows.hold(samples := make_samples(step, 3, policy=policy, version=step))
                ids = tuple(sample.turn.sample_id for sample in samples)
                waiting.append(RowsOf(policy=policy, micro_batch_id=f"{policy}/{step}", ids=ids))
            await host.accumulate(waiting)
            if step == 0:
                for policy in POLICIES:
                    await host.change(policy, "step", divisors_of(make_samples(step, 3, policy=policy, version=step)))

    asyncio.run(train())
    held = live_bytes()
    added = sum(size for address, size in held.items() if address not in before)
    numbers = sum(
        p.numel()
        for trainer in trainers.values()
        for p in trainer.backward.network.model.parameters()
        if p.requires_grad
    )
    return added, sum(tensor.nbytes for tensor in base.weights.values()), PER_NUMBER * numbers


def test_four_adapters_on_one_base_hold_one_base_and_four_adapters(
    source: Path, make_samples: Callable[..., list[Sample]]
) -> None:
    held, of_base, of_adapters = resident(Base, source, make_samples)
    assert held >= of_base + of_adapters, "witness: weights, sums and moments are counted"
    assert held <= 1.1 * (of_base + of_adapters)


def test_the_measure_sees_a_base_that_was_copied(source: Path, make_samples: Callable[..., list[Sample]]) -> None:
    held, of_base, of_adapters = resident(CopyingBase, source, make_samples)
    assert held >= 5 * of_base + of_adapters
    assert held > 1.1 * (of_base + of_adapters)


@pytest.mark.parametrize("pickles", [True, False])
def test_each_model_of_a_skeleton_is_its_own(source: Path, monkeypatch: pytest.MonkeyPatch, pickles: bool) -> None:
    first = check_model_files(source)
    if not pickles:
        first.forward = lambda *args, **options: None
    monkeypatch.setattr(state, "check_model_files", lambda _: first)
    skeleton = Skeleton(source)
    one, other = skeleton.model(), skeleton.model()
    assert len({id(first), id(one), id(other)}) == 3
    assert not {id(p) for p in one.parameters()} & {id(p) for p in other.parameters()}
    head: Any = one.get_output_embeddings()
    assert one.get_input_embeddings().weight is head.weight, "ties are kept"
    assert all(parameter.is_meta for parameter in one.parameters())
