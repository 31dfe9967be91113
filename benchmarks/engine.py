"""Embedded engine against transformers' continuous batching (`generate_batch`) and static `generate`.

One model of 0.8M parameters (Qwen3 type, random weights), the same prompts, sampling at temperature 1, lengths forced.

    uniform    256 requests of 64 tokens, 64 slots; static batches of 64
    skewed     256 requests, 64 slots, lognormal lengths, the longest 10 times the median; static batches of 64 in
               arrival order, each until its longest is done, of which only the wanted tokens count
    alike      256 requests of 64 tokens behind one system prompt of 256; apart, each has other tokens in its place

The engine runs behind its async interface and device thread, logprobs of both kinds included; the others return ids.
"""

import asyncio
import logging
import statistics
import warnings

import numpy as np
import torch
from common import interleaved, median_ratio, parser, report, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.interface import answers_of
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import FinishReason, GenerationRequest, PolicyName, Sampling
from flexmarl.training.backends.causal_lm import use_onednn

VOCABULARY, PROMPT, REQUESTS, SLOTS, UNIFORM, SYSTEM = 100, 16, 256, 64, 64, 256
LONGEST_BY_MEDIAN = 10.0
WANTED = {"vs_generate_batch": 10.0, "vs_static_uniform": 0.9, "vs_static_skewed": 3.0}
POLICY = PolicyName("solver")


def skewed_lengths(rng: np.random.Generator) -> np.ndarray:
    """Lognormal with median 64; sigma such that the longest of 256 is expected at 10 times the median.

    The largest of 256 standard normals is 2.82 on average, so sigma = ln 10 / 2.82.
    """
    draws = rng.standard_normal((4000, REQUESTS)).max(axis=1).mean()
    sigma = np.log(LONGEST_BY_MEDIAN) / draws
    return np.maximum(1, np.round(UNIFORM * np.exp(sigma * rng.standard_normal(REQUESTS)))).astype(int)


def served_model() -> torch.nn.Module:
    """The model as runs load it for an engine."""
    model = tiny_model(VOCABULARY)
    use_onednn(model)
    return model


class Contenders:
    """The three ways to get the same tokens."""

    def __init__(self, prompts: np.ndarray) -> None:
        self.prompts = prompts
        self.model = tiny_model(VOCABULARY)
        self.batching_model = tiny_model(VOCABULARY)
        self.thread = DeviceThread("bench")
        settings = EmbeddedSettings(slots=SLOTS, max_len=1024)
        self.engine = EmbeddedEngine(
            served_model, settings, policy=POLICY, store=InlineObjectStore(), thread=self.thread
        )
        self.round = 0

    async def embedded(self, lengths: np.ndarray, heads: np.ndarray | None = None) -> int:
        """`heads`: tokens before each prompt."""
        self.round += 1
        prompts = self.prompts if heads is None else np.hstack([heads, self.prompts])
        requests = [
            GenerationRequest(
                request_id=f"{self.round}/{index}",
                policy=POLICY,
                prompt_ids=prompt.astype(np.int32),
                sampling=Sampling(max_tokens=int(length)),
                seed=index,
            )
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        done = [generation async for generation in answers_of(self.engine, requests)]
        assert all(generation.finish is FinishReason.LENGTH for generation in done)
        return sum(len(generation.response_ids) for generation in done)

    @torch.inference_mode()
    def static(self, lengths: np.ndarray) -> int:
        for start in range(0, len(lengths), SLOTS):
            batch = torch.from_numpy(self.prompts[start : start + SLOTS])
            longest = int(lengths[start : start + SLOTS].max())
            out = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )
            assert out.shape[1] == PROMPT + longest
        return int(lengths.sum())

    def generate_batch(self, length: int, memory: float | None) -> int:
        """As a user calls it, or with its cache held to a share of the free memory, which makes it faster on a CPU."""
        config = GenerationConfig(
            max_new_tokens=length, min_new_tokens=length, do_sample=True, eos_token_id=-1, pad_token_id=0
        )
        done = self.batching_model.generate_batch(
            [prompt.tolist() for prompt in self.prompts],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=memory) if memory else None,
            progress_bar=False,
        )
        return sum(len(output.generated_tokens) for output in done.values())


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    contenders = Contenders(rng.integers(1, VOCABULARY, (REQUESTS, PROMPT)))
    uniform, skewed = np.full(REQUESTS, UNIFORM), skewed_lengths(rng)
    apart = rng.integers(1, VOCABULARY, (REQUESTS, SYSTEM))
    alike = np.repeat(apart[:1], REQUESTS, 0)
    with asyncio.Runner() as loop:
        rates = interleaved(
            {
                "embedded, uniform": lambda: loop.run(contenders.embedded(uniform)),
                "static generate, uniform": lambda: contenders.static(uniform),
                "embedded, skewed": lambda: loop.run(contenders.embedded(skewed)),
                "static generate, skewed": lambda: contenders.static(skewed),
                "embedded, alike": lambda: loop.run(contenders.embedded(uniform, alike)),
                "embedded, apart": lambda: loop.run(contenders.embedded(uniform, apart)),
                "generate_batch, uniform": lambda: contenders.generate_batch(UNIFORM, None),
                "generate_batch, small cache": lambda: contenders.generate_batch(UNIFORM, 0.1),
            },
            arguments.repeats,
        )
        loop.run(contenders.engine.close())
    contenders.thread.close()
    figures = {
        "vs_generate_batch": median_ratio(rates, "embedded, uniform", "generate_batch, uniform"),
        "vs_generate_batch_small_cache": median_ratio(rates, "embedded, uniform", "generate_batch, small cache"),
        "vs_static_uniform": median_ratio(rates, "embedded, uniform", "static generate, uniform"),
        "vs_static_skewed": median_ratio(rates, "embedded, skewed", "static generate, skewed"),
        "alike_vs_apart": median_ratio(rates, "embedded, alike", "embedded, apart"),
    }
    rows = [
        (name, f"{statistics.median(runs):.0f}", f"{min(runs):.0f}", f"{max(runs):.0f}", str(len(runs)))
        for name, runs in rates.items()
    ]
    title = (
        f"useful tokens/s: {REQUESTS} requests, {SLOTS} slots; skewed: median {np.median(skewed):.0f}, "
        f"mean {skewed.mean():.0f}, longest {skewed.max()}"
    )
    report(title, ("contender", "median", "min", "max", "runs"), rows, figures, as_json=arguments.json, wanted=WANTED)


if __name__ == "__main__":
    main()
