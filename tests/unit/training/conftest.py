"""A tiny causal LM and random turns for it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.records import AgentName, EpisodeId, FinishReason, PolicyName, Sample, Turn, Version, VersionRun
from flexmarl.records.ids import make_sample_id

VOCAB = 23


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """About 5 000 parameters, tied embeddings, always the same for a seed."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def random_samples(
    seed: int,
    num_episodes: int = 6,
    *,
    version: int = 0,
    policy: str = "solver",
    zero_advantages: float = 0.3,
    weights: tuple[float, ...] = (1.0, 1.0, 0.5, 0.0),
    empty: float = 0.1,
) -> list[Sample]:
    """Ragged rows of one policy, one to three per episode, some empty, some with advantage or weight 0."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(num_episodes):
        rows = []
        for hop in range(random.integers(1, 4)):
            length = 0 if random.random() < empty else int(random.integers(1, 9))
            logprobs = (-1 - random.random(length)).astype(np.float32)
            turn = Turn(
                sample_id=make_sample_id("task", hop, f"g0e{index}a0"),
                episode=EpisodeId(f"g0e{index}a0"),
                agent=AgentName(policy),
                policy=PolicyName(policy),
                prompt_ids=random.integers(0, VOCAB, random.integers(1, 12)).astype(np.int32),
                response_ids=random.integers(0, VOCAB, length).astype(np.int32),
                logprobs=logprobs,
                raw_logprobs=logprobs,
                versions=(VersionRun(0, Version(version)),),
                finish=FinishReason.STOP,
            )
            advantage = 0.0 if random.random() < zero_advantages else float(random.normal())
            rows.append((turn, advantage, float(random.choice(weights))))
        tokens = sum(weight * len(turn.response_ids) for turn, _, weight in rows)
        samples += [Sample(turn=t, advantage=a, weight=w, episode_tokens=tokens) for t, a, w in rows]
    return samples


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return tiny_model


@pytest.fixture(scope="session")
def make_samples() -> Callable[..., list[Sample]]:
    return random_samples
