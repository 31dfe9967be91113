"""Conversations on two instances of vLLM: prompt tokens that are computed if each returns to the one with its prefix.

    .venv-vllm/bin/python benchmarks/vllm_routing.py --json

A model of 1M parameters with random weights, two engines in processes of their own on Ray, and the pool of a run. Each
step plays 24 conversations of 8 calls at once; a prompt is all that was said, and 48 new tokens; replies have 8 to 64
tokens, and between two calls a tool runs for up to 0.2 s. `pool.routing: conversations` sends a call to the instance
with its prefix, unless that has far more work than another; `least_requests` to the one with the least load;
`least_tokens`, the default, to the one with its prefix if that has no more work than another. The steps of all come in
turn, with the same lengths and tool times, but each with prompts of its own.

    computed_vs_least_loaded   prompt tokens that vLLM computes, by its own metrics: conversations by least_requests
    computed_vs_least_tokens   the same, by least_tokens
    step_vs_least_loaded       seconds of a step: conversations by least_requests
"""

import asyncio
import statistics
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import median_ratio, parser, report
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_beside import Hosted

from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import EngineError
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings, VllmSettings
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.records import FinishReason, GenerationRequest, InstanceId, PolicyName, Sampling, WorkerId

CONVERSATIONS, CALLS, NEW, LONGEST = 24, 8, 48, 64
"""Conversations at once, calls of each, new prompt tokens of a call, and tokens of the longest reply."""
TOOL_S = 0.2
"""Seconds that a tool takes at most."""
POLICY, VOCABULARY = PolicyName("solver"), 96
ROUTINGS = ("least_requests", "least_tokens", "conversations")
VLLM = VllmSettings(max_len=CALLS * (NEW + LONGEST) + 32, slots=32, kv_gib=0.5, options={"block_size": 32})
WANTED_AT_MOST = {"computed_vs_least_loaded": 0.6, "step_vs_least_loaded": 1.0}


def tiny_for_vllm() -> Qwen3ForCausalLM:
    """The small model of the other benchmarks, with heads that vLLM takes on a CPU."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


async def converse(pool: InferencePool, number: int, shape: int) -> None:
    """Plays one conversation: its texts are drawn from its number, its lengths and tool times from `shape`."""
    texts, rng = np.random.default_rng([number, 0]), np.random.default_rng([shape, 1])
    said = np.zeros(0, np.int32)
    for call in range(CALLS):
        said = np.concatenate([said, texts.integers(1, VOCABULARY, NEW).astype(np.int32)])
        answer = await pool.generate(
            GenerationRequest(
                request_id=f"{number}-{call}",
                policy=POLICY,
                prompt_ids=said,
                sampling=Sampling(max_tokens=int(rng.integers(8, LONGEST + 1))),
                seed=number,
                conversation=str(number),
            )
        )
        if answer.finish is not FinishReason.LENGTH:
            raise RuntimeError(f"{answer.request_id} ended with {answer.finish}: {answer.error}")
        said = np.concatenate([said, answer.response_ids])
        await asyncio.sleep(rng.uniform(0, TOOL_S))


async def step(engines: list[InferenceEngine], routing: str, numbers: "count[int]", repeat: int) -> tuple[int, float]:
    """Plays conversations that nobody has seen; returns the computed prompt tokens, and the seconds."""
    computed = -sum([(await engine.usage()).prompt_tokens for engine in engines])
    async with InferencePool({POLICY: engines}, PoolSettings.model_validate({"routing": routing})).open() as pool:
        began = time.perf_counter()
        await asyncio.gather(
            *(converse(pool, next(numbers), repeat * CONVERSATIONS + one) for one in range(CONVERSATIONS))
        )
        seconds = time.perf_counter() - began
    return computed + sum([(await engine.usage()).prompt_tokens for engine in engines]), seconds


async def measured(repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Computed prompt tokens, and seconds of a step, by routing; the first step of each is not counted."""
    computed: dict[str, list[float]] = {routing: [] for routing in ROUTINGS}
    seconds: dict[str, list[float]] = {routing: [] for routing in ROUTINGS}
    with tempfile.TemporaryDirectory(prefix="fx") as folder, RunLeases("vllm", root=Path(folder)) as leases:
        tiny_for_vllm().save_pretrained(source := Path(folder) / "model")
        store, engines = ShmObjectStore(leases.shared_memory()), list[InferenceEngine]()
        async with ray_cluster(ClusterSettings(backend="ray"), leases=leases, residents=2) as cluster:
            for number in range(2):  # One after the other: each start takes both cores.
                print(f"starting instance {number}", flush=True)
                spec = ResidentSpec(
                    name=WorkerId.engine(InstanceId(POLICY, number)),
                    kind=ResidentKind.ENGINE,
                    contract=WeightedEngine,
                    make=cast(Any, partial(Hosted, POLICY, VLLM, str(source), store, "cpu")),
                    error=EngineError,
                )
                engines.append((await cluster.spawn([spec]))[0].remote)
            numbers = count()
            for repeat in range(repeats + 1):
                for routing in ROUTINGS:
                    tokens, took = await step(engines, routing, numbers, repeat)
                    if repeat:
                        computed[routing].append(tokens)
                        seconds[routing].append(took)
            for engine in engines:
                await engine.close()
    return computed, seconds


def main() -> None:
    """Prints the table."""
    chosen = parser(__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(chosen.threads)
    computed, seconds = asyncio.run(measured(chosen.repeats))
    report(
        f"{CONVERSATIONS} conversations of {CALLS} calls on two instances of vLLM",
        ("pool.routing", "prompt tokens computed", "seconds of a step"),
        [
            (name, f"{statistics.median(computed[name]):.0f}", f"{statistics.median(seconds[name]):.2f}")
            for name in ROUTINGS
        ],
        {
            "computed_vs_least_loaded": median_ratio(computed, "conversations", "least_requests"),
            "computed_vs_least_tokens": median_ratio(computed, "conversations", "least_tokens"),
            "step_vs_least_loaded": median_ratio(seconds, "conversations", "least_requests"),
        },
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
