"""Tiny random models whose heads are large enough for every kernel, and rows and requests for them."""

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    GenerationRequest,
    MicroBatch,
    PolicyName,
    Sample,
    Sampling,
    Turn,
    Version,
    VersionRun,
)
from flexmarl.records.ids import make_sample_id

SOLVER = PolicyName("solver")
VOCABULARY = 61


def shape(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
    }


def qwen3(seed: int = 0, *, head_dim: int = 16) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**shape(head_dim), tie_word_embeddings=True)).eval()


def llama(seed: int = 0, *, head_dim: int = 16) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**shape(head_dim), tie_word_embeddings=False)).eval()


MODELS = {
    "qwen3": qwen3,
    "llama": llama,
    # The width of the heads of examples/math_team: no power of two.
    "heads of 40": partial(qwen3, head_dim=40),
    "heads of 64": partial(qwen3, head_dim=64),
}


def letters(ids: Any) -> str:
    """Text of ids, for stop strings."""
    return "".join(chr(97 + i % 26) for i in ids)


def engine(
    make_model: Any, store: ObjectStore, thread: DeviceThread, device: str, *, deterministic: bool = False, **more: Any
) -> EmbeddedEngine:
    return EmbeddedEngine(
        make_model,
        EmbeddedSettings(**{"slots": 4, "max_len": 128, "kept_prefixes": 3, **more}),
        policy=SOLVER,
        store=store,
        thread=thread,
        device=device,
        deterministic=deterministic,
        decode=letters,
    )


def requests(number: int = 12, *, longest: int = 60, max_tokens: int = 24) -> list[GenerationRequest]:
    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            request_id=f"r{i}",
            policy=SOLVER,
            prompt_ids=random.integers(0, VOCABULARY, random.integers(1, longest + 1)).astype(np.int32),
            sampling=Sampling(max_tokens=max_tokens),
            seed=i,
        )
        for i in range(number)
    ]


def rows(seed: int, *, episodes: int = 4, prompt: int = 40, turns: int = 3, response: int = 12) -> list[Sample]:
    """Turns of episodes of one group: one prompt, and every turn goes on from the last."""
    random = np.random.default_rng(seed)
    question = random.integers(0, VOCABULARY, prompt).astype(np.int32)
    found: list[Sample] = []
    for episode in range(episodes):
        so_far = question
        for number in range(turns):
            sampled = random.integers(0, VOCABULARY, random.integers(1, response + 1)).astype(np.int32)
            logprobs = (-3 - random.random(len(sampled))).astype(np.float32)
            turn = Turn(
                sample_id=make_sample_id("task", number, f"g0e{episode}a0"),
                episode=EpisodeId(f"g0e{episode}a0"),
                agent=AgentName("solver"),
                policy=SOLVER,
                prompt_ids=so_far,
                response_ids=sampled,
                logprobs=logprobs,
                raw_logprobs=logprobs,
                versions=(VersionRun(0, Version(0)),),
                finish=FinishReason.STOP,
            )
            tokens = float(turns * response)
            found.append(Sample(turn=turn, advantage=float(random.normal()), weight=1.0, episode_tokens=tokens))
            so_far = np.concatenate((so_far, sampled, random.integers(0, VOCABULARY, 3).astype(np.int32)))
    return found


def micro_batches(samples: list[Sample], size: int = 4) -> list[MicroBatch]:
    cuts = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [MicroBatch(micro_batch_id=f"mb/{i}", policy=SOLVER, samples=tuple(cut)) for i, cut in enumerate(cuts)]
