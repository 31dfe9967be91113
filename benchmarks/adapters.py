"""What a policy with a LoRA adapter publishes: merged weights, or the adapter alone.

    python benchmarks/adapters.py --json

The seed model of examples/math_team with an adapter of rank 8. `adapter_bytes_vs_merged`: bytes of one version;
`load_vs_merged`: seconds in which an embedded engine loads one, checksum of every byte included.
"""

import asyncio
import statistics
import time
from pathlib import Path

import torch
from common import parser, report

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.interface import EngineParts, WeightedEngine, make_engine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import PolicyName, Version
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

MODEL = Path(__file__).parents[1] / "examples" / "math_team" / "seed_model"
POLICY = PolicyName("solver")


class Published:
    """A trainer that publishes one way, and an engine that loads what it has published."""

    def __init__(self, publish: str, rank: int, thread: DeviceThread) -> None:
        settings = TrainingSettings.model_validate({"lora": {"rank": rank}, "publish": publish})
        self._objects = InlineObjectStore()
        self._trainer = SingleProcessTrainer(POLICY, load_model(str(MODEL)), settings, self._objects)
        parts = EngineParts(
            policy=POLICY, make_model=lambda: load_model(str(MODEL)), decode=str, store=self._objects, thread=thread
        )
        self._engine: WeightedEngine = make_engine(EmbeddedSettings(slots=8), parts)  # type: ignore[assignment]
        self.seconds: list[float] = []
        self.num_bytes = 0

    async def publish(self) -> None:
        """Sets the weights."""
        self._checksum = await self._trainer.publish(Version(0))
        tree = await self._objects.get(weights_key(POLICY, Version(0)))
        self.num_bytes = sum(tensor.nbytes for tensor in tree.values())

    async def load(self) -> None:
        """Loads them once more, and notes the processor's seconds."""
        began = time.process_time()
        held = await self._engine.load_weights(POLICY, Version(0))
        self.seconds.append(time.process_time() - began)
        assert held == self._checksum

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close()


async def measured(rank: int, repeats: int) -> tuple[Published, Published]:
    """Both ways, loads in turn; the first of each is not counted."""
    thread = DeviceThread()
    both = Published("merged", rank, thread), Published("adapter", rank, thread)
    for one in both:
        await one.publish()
        await one.load()
        one.seconds.clear()
    for _ in range(repeats):
        for one in both:
            await one.load()
    for one in both:
        await one.close()
    thread.close()
    return both


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rank", type=int, default=8, help="rank of the adapter (default 8)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    merged, adapter = asyncio.run(measured(chosen.rank, chosen.repeats))
    report(
        f"One version of a policy with an adapter of rank {chosen.rank}",
        ("published", "KiB", "ms to load"),
        [
            (name, f"{one.num_bytes / 1024:.0f}", f"{1000 * statistics.median(one.seconds):.1f}")
            for name, one in (("merged", merged), ("adapter", adapter))
        ],
        {
            "adapter_bytes_vs_merged": adapter.num_bytes / merged.num_bytes,
            "load_vs_merged": statistics.median(a / b for a, b in zip(adapter.seconds, merged.seconds, strict=True)),
        },
        as_json=chosen.json,
        wanted_at_most={"adapter_bytes_vs_merged": 0.25},
    )


if __name__ == "__main__":
    main()
