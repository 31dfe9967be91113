"""Models of three sizes, an engine and a trainer of them on the device, and requests."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.torch_device import place
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.interface import answers_of
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import GenerationRequest, PolicyName, Sampling
from flexmarl.training.backends.causal_lm import DTYPES, load_model, prepare_for_training
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import Dtype, TrainingSettings

ROOT = Path(__file__).parents[2]
SOLVER = PolicyName("solver")
MakeModel = Callable[[], PreTrainedModel]


def seed_model() -> PreTrainedModel:
    """That of examples/math_team: 0.9M parameters, trained, heads of 40."""
    return load_model(ROOT / "examples/math_team/seed_model")


def thirty_million() -> PreTrainedModel:
    """Qwen3-type with random weights, heads of 64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def half_billion(vocabulary: int = 32768) -> PreTrainedModel:
    """Qwen2.5-0.5B's shape with random weights, on the CPU; of its 151 936 ids, some."""
    return qwen2(vocabulary, hidden=896, layers=24, heads=14, inner=4864)


def one_and_a_half_billion(vocabulary: int = 32768) -> PreTrainedModel:
    """The same of Qwen2.5-1.5B."""
    return qwen2(vocabulary, hidden=1536, layers=28, heads=12, inner=8960)


def qwen2(vocabulary: int, *, hidden: int, layers: int, heads: int, inner: int) -> PreTrainedModel:
    """Qwen2-type with two key heads and random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=inner,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def requests(vocabulary: int, *, longest: int, max_tokens: int, number: int = 32) -> list[GenerationRequest]:
    """Random prompts of all lengths up to `longest`."""
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            request_id=f"r{i}",
            policy=SOLVER,
            prompt_ids=random.integers(0, vocabulary, random.integers(1, longest + 1)).astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens),
            seed=i,
        )
        for i in range(number)
    ]


@asynccontextmanager
async def engine_alone(make: MakeModel, device: str, dtype: Dtype = "bfloat16") -> AsyncIterator[EmbeddedEngine]:
    """An engine with room for 32 requests of 2 048 tokens."""
    thread = DeviceThread("device")
    try:
        made = EmbeddedEngine(
            make, settings_of(dtype), policy=SOLVER, store=InlineObjectStore(), thread=thread, device=device
        )
        async with made as engine:
            yield engine
    finally:
        thread.close()


@asynccontextmanager
async def engine_and_trainer(
    make: MakeModel, device: str, dtype: Dtype
) -> AsyncIterator[tuple[EmbeddedEngine, SingleProcessTrainer]]:
    """Both with the same weights."""
    async with engine_alone(make, device, dtype) as engine:
        settings = TrainingSettings(dtype=dtype, tree="off")
        yield engine, SingleProcessTrainer(SOLVER, make(), settings, InlineObjectStore(), device=device)


def settings_of(dtype: Dtype) -> EmbeddedSettings:
    """Of an engine without kept prefixes, whose memory is then known."""
    return EmbeddedSettings.model_validate({"slots": 32, "max_len": 2048, "dtype": dtype, "kept_prefixes": 0})


async def answers(engine: EmbeddedEngine, asked: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """The ids of each answer."""
    return {answer.request_id: answer.response_ids.tolist() async for answer in answers_of(engine, asked)}


def on_device(model: PreTrainedModel, device: str, dtype: Dtype) -> PreTrainedModel:
    """As a trainer prepares it."""
    place(model, device, DTYPES[dtype])
    prepare_for_training(model, activation_checkpointing=True)
    return model
