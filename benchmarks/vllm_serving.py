"""Engine on vLLM, on the CPU: what our layer costs, how a version arrives, and what an update under way costs.

    .venv-vllm/bin/python benchmarks/vllm_serving.py --json

A model with the shape of SmolLM2-135M and random weights in float32; every engine is in a process of its own, on Ray,
and weights cross in shared memory, as in a run. `make test-vllm` makes the environment.

    throughput_vs_bare   tokens/s of requests that cross to our engine, by those of the same requests that its process
                         gives to the same `AsyncLLM` itself, in turn
    publish_vs_merged    seconds from the trainer's call until vLLM serves a version, canary and digest included: the
                         adapter alone by merged weights
    recomputed           prompt tokens that vLLM computes more if an update of whole weights comes half-way, by the
                         tokens of the requests; none is lost. `recomputed_adapter`: the same with an adapter, whose
                         last two versions are loaded
    vllm_vs_embedded     tokens/s of the same requests, by those of the embedded engine in its place
"""

import asyncio
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import config_of_135m, median_ratio, parser, report
from transformers import LlamaForCausalLM, PreTrainedModel
from vllm_beside import Beside, Hosted

from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import EngineError
from flexmarl.inference.interface import answers_of
from flexmarl.inference.settings import AdapterRoom, EmbeddedSettings, EngineSettings, VllmSettings
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import Checksum
from flexmarl.records import GenerationRequest, InstanceId, PolicyName, Sampling, Version, WorkerId
from flexmarl.training.backends.network import CANARY_TOKENS
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

REQUESTS, PROMPT, TOKENS, LONG, RANK = 16, 64, 32, 64, 8
"""Requests at a time, tokens of each prompt, of each reply, of replies during an update, and the adapter's rank."""
WANTED, WANTED_AT_MOST = {"throughput_vs_bare": 0.95}, {"publish_vs_merged": 0.1}
VLLM = VllmSettings(max_len=512, slots=REQUESTS, kv_gib=0.5)
ENGINES: dict[str, EngineSettings] = {
    "merged": VLLM,
    "adapter": VLLM.model_copy(update={"adapters": AdapterRoom(slots=1, max_rank=RANK)}),
    "embedded": EmbeddedSettings(slots=REQUESTS, max_len=512, kept_prefixes=0),
}
"""By the way in which it is published; the embedded one serves the weights with which it began."""


def spec(name: str, source: Path, store: ShmObjectStore, threads: int) -> ResidentSpec[Beside]:
    """An engine in a process of its own."""
    return ResidentSpec(
        name=WorkerId.engine(InstanceId(PolicyName(name), 0)),
        kind=ResidentKind.ENGINE,
        contract=Beside,
        make=cast(Any, partial(Hosted, name, ENGINES[name], str(source), store, "cpu")),
        error=EngineError,
        threads=threads,
    )


class Round:
    """Makes requests whose prompts are new each time: nothing is kept of an earlier round."""

    def __init__(self) -> None:
        self._numbers = count()

    def requests(self, policy: str, tokens: int = TOKENS) -> list[GenerationRequest]:
        """So many requests as run at a time, with replies of so many tokens."""
        names = [next(self._numbers) for _ in range(REQUESTS)]
        return [
            GenerationRequest(
                request_id=str(name),
                policy=PolicyName(policy),
                prompt_ids=np.random.default_rng(name).integers(1, 49_000, PROMPT).astype(np.int32),
                sampling=Sampling(max_tokens=tokens),
                seed=name,
            )
            for name in names
        ]


async def ours(engine: Beside, requests: Sequence[GenerationRequest]) -> int:
    """Has an engine answer the requests; returns the number of sampled tokens."""
    return sum([len(answer.response_ids) async for answer in answers_of(engine, requests)])


async def throughput(engines: dict[str, Beside], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each way, in turn, after a round that is not counted."""
    made, rates = Round(), {"bare": list[float](), "ours": list[float](), "embedded": list[float]()}
    for repeat in range(repeats + 1):
        for way, rate in rates.items():
            engine = engines["embedded" if way == "embedded" else "merged"]
            requests = made.requests("embedded" if way == "embedded" else "merged")
            began = time.perf_counter()
            tokens = await (engine.bare(requests) if way == "bare" else ours(engine, requests))
            if tokens != REQUESTS * TOKENS:
                raise RuntimeError(f"{way}: {tokens} tokens")
            if repeat:
                rate.append(tokens / (time.perf_counter() - began))
    return rates


class Publisher:
    """A trainer that publishes one way, and the engine that loads it."""

    def __init__(self, way: str, model: PreTrainedModel, store: ShmObjectStore, engine: Beside) -> None:
        settings = TrainingSettings.model_validate({"lora": {"rank": RANK}, "publish": way})
        self.policy, self.engine = PolicyName(way), engine
        self._trainer = SingleProcessTrainer(self.policy, copy.deepcopy(model), settings, store, canary=True)
        self.version = -1

    async def publish(self) -> tuple[float, float]:
        """Publishes one more version; returns the seconds of the trainer, and those until the engine serves it then."""
        began = time.perf_counter()
        checksum = await self.set()
        is_set = time.perf_counter()
        await self.load(checksum)
        return is_set - began, time.perf_counter() - is_set

    async def set(self) -> Checksum:
        """Puts one more version into the object store."""
        self.version += 1
        self._trainer._version = Version(self.version)  # As after a step: the weights stay.
        return await self._trainer.publish(Version(self.version))

    async def load(self, expected: Checksum) -> None:
        """Has the engine load the newest version."""
        if await self.engine.load_weights(self.policy, Version(self.version)) != expected:
            raise RuntimeError(f"{self.policy}: another checksum")

    async def recomputed(self, wait_s: float, made: Round) -> float:
        """Prompt tokens that an update after `wait_s` makes vLLM compute again, by those that it samples."""
        computed, expected = list[int](), await self.set()
        for update in (False, True):
            before = (await self.engine.usage()).prompt_tokens
            playing = asyncio.ensure_future(ours(self.engine, made.requests(self.policy, LONG)))
            await asyncio.sleep(wait_s)
            if update:
                if playing.done():
                    raise RuntimeError("the requests ended before the update")
                await self.load(expected)
            if await playing != REQUESTS * LONG:
                raise RuntimeError("tokens were lost")
            computed.append((await self.engine.usage()).prompt_tokens - before)
        # The canary's own tokens are not those of requests.
        return (computed[1] - CANARY_TOKENS - computed[0]) / (REQUESTS * LONG)


async def measured(
    repeats: int, threads: int
) -> tuple[dict[str, list[float]], dict[str, list[tuple[float, float]]], list[float]]:
    """Rates by way, seconds of publications by way, and the shares that were computed again."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of_135m()).eval()
    with tempfile.TemporaryDirectory(prefix="fx") as folder, RunLeases("vllm", root=Path(folder)) as leases:
        model.save_pretrained(source := Path(folder) / "model")
        store = ShmObjectStore(leases.shared_memory())
        store.create()
        settings = ClusterSettings(backend="ray")
        async with ray_cluster(settings, leases=leases, residents=len(ENGINES)) as cluster:
            engines = {}
            for name in ENGINES:  # One after the other: each start takes both cores.
                print(f"starting the engine '{name}'", flush=True)
                (resident,) = await cluster.spawn([spec(name, source, store, threads)])
                engines[name] = resident.remote
            rates = await throughput(engines, repeats)
            publishers = [Publisher(way, model, store, engines[way]) for way in ("merged", "adapter")]
            seconds: dict[str, list[tuple[float, float]]] = {one.policy: [] for one in publishers}
            for repeat in range(repeats + 1):
                for one in publishers:
                    took = await one.publish()
                    if repeat:
                        seconds[one.policy].append(took)
            half_s = REQUESTS * LONG / max(rates["ours"]) / 2
            again = [await one.recomputed(half_s, Round()) for one in publishers]
            for engine in engines.values():
                await engine.close()
    return rates, seconds, again


def main() -> None:
    """Prints the table."""
    chosen = parser(__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(chosen.threads)
    rates, seconds, again = asyncio.run(measured(chosen.repeats, chosen.threads))
    report(
        f"vLLM with 135M parameters, {REQUESTS} requests of {TOKENS} tokens at a time",
        ("", "tokens/s", "ms until a version is set", "ms until it is served then"),
        [
            ("our engine, merged weights", f"{statistics.median(rates['ours']):.0f}", *_ms(seconds["merged"])),
            ("the same, adapter alone", "", *_ms(seconds["adapter"])),
            ("bare AsyncLLM", f"{statistics.median(rates['bare']):.0f}", "", ""),
            ("embedded engine", f"{statistics.median(rates['embedded']):.0f}", "", ""),
        ],
        {
            "throughput_vs_bare": median_ratio(rates, "ours", "bare"),
            "publish_vs_merged": median_ratio(
                {way: [*map(sum, of)] for way, of in seconds.items()}, "adapter", "merged"
            ),
            "recomputed": again[0],
            "recomputed_adapter": again[1],
            "vllm_vs_embedded": median_ratio(rates, "ours", "embedded"),
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def _ms(seconds: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    return tuple(f"{1000 * statistics.median(of):.0f}" for of in zip(*seconds, strict=True))


if __name__ == "__main__":
    main()
