"""Publishing a policy with a LoRA adapter: merged weights, or the adapter alone.

    python benchmarks/adapters.py --json

A model with the shape of SmolLM2-135M and random weights, an adapter of rank 8, and two embedded instances in this
process. `adapter_bytes_vs_merged`: bytes of one version. `vs_merged`: seconds until both instances serve a version,
from the call of the trainer, checksums included. `loop_ms`: the longest time in which the event loop got no turn
meanwhile, adapter alone; `loop_ms_merged`: merged.
"""

import asyncio
import copy
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from common import parser, report
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.interface import EngineParts, WeightedEngine, make_engine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import PolicyName, Version
from flexmarl.training.backends.causal_lm import use_onednn
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

POLICY, KEY = PolicyName("solver"), weights_key(PolicyName("solver"), Version(0))


def model_of_135m() -> PreTrainedModel:
    """A model with the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    use_onednn(model)
    return model


class Published:
    """A trainer that publishes one way, and instances that load what it has published."""

    def __init__(self, publish: str, rank: int, instances: int, model: PreTrainedModel, thread: DeviceThread) -> None:
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
        made = [make_engine(EmbeddedSettings(slots=8, max_len=256), parts) for _ in range(instances)]
        self._engines: list[WeightedEngine] = made  # type: ignore[assignment]
        self.seconds: list[float] = []
        self.blocked: list[float] = []
        self.num_bytes = 0

    async def publish(self) -> None:
        """Publishes the version anew, and notes how long that took and how long the event loop was blocked."""
        await self._objects.release(KEY)
        async with longest_wait() as waits:
            began = time.perf_counter()
            checksum = await self._trainer.publish(Version(0))
            held = await asyncio.gather(*(engine.load_weights(POLICY, Version(0)) for engine in self._engines))
            self.seconds.append(time.perf_counter() - began)
        self.blocked.append(max(waits))
        assert set(held) == {checksum}
        self.num_bytes = sum(tensor.nbytes for tensor in (await self._objects.get(KEY)).values())

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
    """Both ways in turn; the first of each, which also reads the base, is not counted."""
    thread, model = DeviceThread(), model_of_135m()
    merged, adapter = (Published(way, rank, instances, model, thread) for way in ("merged", "adapter"))
    for repeat in range(repeats + 1):
        for one in (merged, adapter):
            await one.publish()
            if not repeat:
                one.seconds.clear()
                one.blocked.clear()
    for one in (merged, adapter):
        await one.close()
    thread.close()
    return merged, adapter


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rank", type=int, default=8, help="rank of the adapter (default 8)")
    options.add_argument("--instances", type=int, default=2, help="instances that load each version (default 2)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
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
        },
        as_json=chosen.json,
        wanted_at_most={"adapter_bytes_vs_merged": 0.05, "vs_merged": 0.05, "loop_ms": 100, "loop_ms_merged": 100},
    )


if __name__ == "__main__":
    main()
