"""What every trainer of one policy can do."""

from pathlib import Path
from typing import Protocol

from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, Version


class Trainer(Protocol):
    """The running trainer of one policy. Called by its session loop, one call at a time.

    Gradients are accumulated un-normalised; `step` divides by the global divisors once (ALGORITHMS section 9,
    "deferred divisor"), so that the update equals the full-batch update whatever the split and the order.
    """

    async def accumulate(self, batch: MicroBatch) -> LossReport:
        """Adds the batch's gradient sums to the cache. Idempotent by micro-batch id since the last `step`."""
        ...

    async def step(self, divisors: Divisors) -> Version:
        """One optimiser update from the cached sums, which are then cleared; returns the new version."""
        ...

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets the current weights in the object store; `version` must be the trainer's own."""
        ...

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Raw log-probabilities of the sampled tokens under the current weights, one [R] float32 array per sample."""
        ...

    async def save(self, path: Path) -> None:
        """Writes weights, optimiser, schedule and version into the folder `path`, which it makes."""
        ...

    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, bit for bit; returns the version. Raises CheckpointError."""
        ...

    async def export(self, path: Path) -> None:
        """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""
        ...
