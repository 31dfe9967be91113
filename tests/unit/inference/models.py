"""Tiny random models, requests, and the independent reference: a plain forward over whole sequences."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.records import Generation, GenerationRequest, PolicyName, Sampling

VOCABULARY = 61
POLICY = PolicyName("solver")
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}


def qwen3(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).eval()


def llama(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).eval()


def letters(ids: Sequence[int]) -> str:
    """Ids 1..26 are letters; every third id carries two of them, so that stop strings straddle tokens."""
    return "".join(chr(97 + i % 26) + (chr(97 + (i + 1) % 26) if i % 3 == 0 else "") for i in ids)


def settings(**changes: object) -> EmbeddedSettings:
    return EmbeddedSettings(**{"slots": 4, "max_len": 96, "kept_prefixes": 3, **changes})  # type: ignore[arg-type]


def request(
    name: object,
    prompt: Sequence[int] | np.ndarray = (1, 2, 3),
    *,
    seed: int = 0,
    conversation: str | None = None,
    **sampling: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name),
        policy=POLICY,
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
        seed=seed,
        conversation=conversation,
    )


def run(core: EngineCore, requests: Sequence[GenerationRequest] = ()) -> dict[str, Generation]:
    """Steps until nothing is left; answers by request id."""
    done = [refused for one in requests if (refused := core.add(one)) is not None]
    while not core.idle:
        done += core.step()
    return {generation.request_id: generation for generation in done}


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """The model's own log-probabilities of the response, by one plain forward over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    picked = torch.log_softmax(logits.double(), -1).gather(1, torch.from_numpy(response).long()[:, None])
    return picked[:, 0].numpy()
