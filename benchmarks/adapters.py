"""Publishing a policy with a LoRA adapter: merged weights, or the adapter alone.

    python benchmarks/adapters.py --json

A model with the shape of SmolLM2-135M and random weights, an adapter of rank 8, and two embedded instances in this
process. `adapter_bytes_vs_merged`: bytes of one version. `vs_merged`: seconds until both instances serve a version,
from the call of the trainer, checksums included. `loop_ms`: the longest time in which the event loop got no turn
meanwhile, adapter alone; `loop_ms_merged`: merged. `decode_vs_merged`, `decode_vs_merged_1m`: tokens per CPU second
of an engine that adds the adapter's output to its base's, by those of one with merged weights: the same model with 8
requests at a time, and one of 0.8M parameters with 64, on one thread.
"""

import asyncio
import copy
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import torch
from common import config_of_135m, interleaved_rates, median_ratio, parser, report, tiny_model
from device_costs import batch
from transformers import LlamaForCausalLM, PreTrainedModel

from flexmarl.assemble.residents import settle_memory
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.interface import EngineParts, WeightedEngine, answers_of, make_engine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import GenerationRequest, PolicyName, Sampling
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.causal_lm import use_onednn
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

POLICY = PolicyName("solver")
VOCABULARY, PROMPT, MAX_TOKENS = 100, 32, 48
"""Tokens of the small model, of each prompt and of each reply."""


def model_of_135m() -> PreTrainedModel:
    """A model with the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of_135m())
    use_onednn(model)
    return model


def model_of_1m() -> PreTrainedModel:
    """The small model of the other benchmarks, 0.8M parameters."""
    model = tiny_model(VOCABULARY)
    use_onednn(model)
    return model


class Published:
    """A trainer that publishes one way, and instances that load what it has published."""

    def __init__(
        self,
        publish: str,
        rank: int,
        instances: int,
        model: PreTrainedModel,
        thread: DeviceThread,
        slots: int = 8,
    ) -> None:
        self._slots, self._numbers = slots, count()
        settings = TrainingSettings.model_validate({"lora": {"rank": rank}, "publish": publish})
        self._objects = InlineObjectStore(thread)
        self._trainer = SingleProcessTrainer(POLICY, copy.deepcopy(model), settings, self._objects, thread=thread)
        parts = EngineParts(
            policy=POLICY,
            make_model=lambda: copy.deepcopy(model),
            decode=str,
            store=self._objects,
            thread=thread,
        )
        made = [
            make_engine(EmbeddedSettings(slots=slots, max_len=256, kept_prefixes=0, threads=1), parts)
            for _ in range(instances)
        ]
        self._engines: list[WeightedEngine] = made  # type: ignore[assignment]
        self.seconds: list[float] = []
        self.blocked: list[float] = []
        self.num_bytes = 0

    async def publish(self) -> None:
        """Publishes a new version, and notes how long that took and how long the event loop was blocked."""
        work = batch(next(self._numbers), 2, 16)
        await self._trainer.accumulate_batch(work)
        await self._trainer.step(divisors_of(work.samples))
        version, key = self._trainer.version, weights_key(POLICY, self._trainer.version)
        async with longest_wait() as waits:
            began = time.perf_counter()
            checksum = await self._trainer.publish(version)
            held = await asyncio.gather(*(engine.load_weights(POLICY, version) for engine in self._engines))
            self.seconds.append(time.perf_counter() - began)
        self.blocked.append(max(waits))
        assert set(held) == {checksum}
        self.num_bytes = sum(tensor.nbytes for tensor in (await self._objects.get(key)).values())
        await self._objects.release(key)

    async def play(self) -> float:
        """Has the first instance answer a prompt in each of its slots; returns tokens per second of the processor."""
        requests = [
            GenerationRequest(
                request_id=str(next(self._numbers)),
                policy=POLICY,
                prompt_ids=np.random.default_rng(slot).integers(1, VOCABULARY, PROMPT).astype(np.int32),
                sampling=Sampling(max_tokens=MAX_TOKENS),
                seed=slot,
            )
            for slot in range(self._slots)
        ]
        began = time.process_time()
        tokens = sum([len(found.response_ids) async for found in answers_of(self._engines[0], requests)])
        return tokens / (time.process_time() - began)

    async def close(self) -> None:
        """Ends the engines."""
        for engine in self._engines:
            await engine.close()


@asynccontextmanager
async def longest_wait() -> AsyncIterator[list[float]]:
    """Collects the seconds between the turns that a task of the event loop gets while the block lasts."""
    waits = [0.0]

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            waits.append(now - last)
            last = now

    watching = asyncio.ensure_future(watch())
    try:
        yield waits
    finally:
        watching.cancel()


async def measured(rank: int, instances: int, repeats: int) -> tuple[Published, Published]:
    """Both ways in turn; the seconds of the first of each, which also reads the base, are not counted."""
    thread, model = DeviceThread(), model_of_135m()
    merged, adapter = (Published(way, rank, instances, model, thread) for way in ("merged", "adapter"))
    for repeat in range(repeats + 1):
        for one in (merged, adapter):
            await one.publish()
            if not repeat:
                one.seconds.clear()
    for one in (merged, adapter):
        await one.close()
    thread.close()
    return merged, adapter


def decoding(make_model: Callable[[], PreTrainedModel], slots: int, rank: int, repeats: int) -> float:
    """Tokens per CPU second with the adapter beside its base, by those with merged weights."""
    thread, model = DeviceThread(), make_model()
    ways = {way: Published(way, rank, 1, model, thread, slots) for way in ("merged", "adapter")}
    with asyncio.Runner() as loop:
        for one in ways.values():
            loop.run(one.publish())
        rates = interleaved_rates({way: lambda one=one: loop.run(one.play()) for way, one in ways.items()}, repeats)
        for one in ways.values():
            loop.run(one.close())
    thread.close()
    return median_ratio(rates, "adapter", "merged")


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rank", type=int, default=8, help="rank of the adapter (default 8)")
    options.add_argument("--instances", type=int, default=2, help="instances that load each version (default 2)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    settle_memory()
    merged, adapter = asyncio.run(measured(chosen.rank, chosen.instances, chosen.repeats))
    report(
        f"One version of a policy with an adapter of rank {chosen.rank}, {chosen.instances} instances",
        ("published", "MiB", "ms until all serve it", "ms of the loop blocked"),
        [
            (
                name,
                f"{one.num_bytes / 2**20:.1f}",
                f"{1000 * statistics.median(one.seconds):.0f}",
                f"{1000 * max(one.blocked):.0f}",
            )
            for name, one in (("merged", merged), ("adapter", adapter))
        ],
        {
            "adapter_bytes_vs_merged": adapter.num_bytes / merged.num_bytes,
            "vs_merged": statistics.median(a / b for a, b in zip(adapter.seconds, merged.seconds, strict=True)),
            "loop_ms": 1000 * max(adapter.blocked),
            "loop_ms_merged": 1000 * max(merged.blocked),
            "decode_vs_merged": decoding(model_of_135m, 8, chosen.rank, chosen.repeats),
            "decode_vs_merged_1m": decoding(model_of_1m, 64, chosen.rank, 4 * chosen.repeats),
        },
        as_json=chosen.json,
        wanted={"decode_vs_merged": 0.9},
        wanted_at_most={"adapter_bytes_vs_merged": 0.05, "vs_merged": 0.05, "loop_ms": 100, "loop_ms_merged": 100},
    )


if __name__ == "__main__":
    main()
