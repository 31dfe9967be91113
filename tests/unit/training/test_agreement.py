"""An engine and a trainer of one model, in every type: the same tokens have the same log-probabilities in both."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import GenerationRequest, PolicyName, Sampling
from flexmarl.testing.training import Agreement, agreement
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

SOLVER = PolicyName("solver")
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}


def qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def far_from_the_start(length: int = 900) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            request_id=f"r{number}",
            policy=SOLVER,
            prompt_ids=random.integers(0, 61, length - 40 * number).astype(np.int32),
            sampling=Sampling(max_tokens=32),
            seed=number,
        )
        for number in range(8)
    ]


def agreed(make: Callable[[], PreTrainedModel], dtype: Literal["float32", "bfloat16"]) -> Agreement:
    async def both() -> Agreement:
        thread = DeviceThread("test")
        try:
            settings = EmbeddedSettings(slots=8, max_len=1024, dtype=dtype)
            store = InlineObjectStore()
            async with EmbeddedEngine(make, settings, policy=SOLVER, store=store, thread=thread) as engine:
                trainer = SingleProcessTrainer(SOLVER, make(), TrainingSettings(dtype=dtype, tree="off"), store)
                return await agreement(engine, trainer, far_from_the_start())
        finally:
            thread.close()

    return asyncio.run(both())


@pytest.mark.parametrize("make", [qwen3, llama])
def test_in_float32_they_agree_to_the_last_digits(make: Callable[[], PreTrainedModel]) -> None:
    found = agreed(make, "float32")
    assert found.num_tokens == 8 * 32
    assert found.largest <= 1e-4


@pytest.mark.parametrize("make", [qwen3, llama])
def test_in_bfloat16_they_agree_at_distant_positions_too(make: Callable[[], PreTrainedModel]) -> None:
    """Rounding does a thousandth of a nat; rotary frequencies in bfloat16 in one of the two do 17 to 30."""
    assert agreed(make, "bfloat16").mean <= 0.005
