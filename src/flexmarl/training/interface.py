"""What every trainer of one policy can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flexmarl.cluster.proxy import alters, restores
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import CreditLine, Divisors, FloatArray, LossReport, MicroBatch, SampleId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimiser update was."""

    version: Version
    """The version it made."""
    num_samples: int
    num_tokens: float
    """Weighted sampled tokens of the batch."""
    loss: float
    """S / D of docs/math.md section 1."""
    grad_norm: float
    """L2 norm of the divided gradient, before clipping."""
    learning_rate: float
    means: Mapping[str, float] = field(default_factory=dict)
    """`clipped`, `kl_to_sampler`, `entropy`, and what a correction measures: per weighted token of the rows that went
    through the model."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraised:
    """What a trainer can say of one turn before it is credited."""

    values: FloatArray | None
    """[R] float32: what the critic expects in front of each sampled token; None without a critic."""
    reference: FloatArray | None
    """[R] float32: each token's raw log-probability under the initial weights; None where no setting compares."""


class Trainer(Protocol):
    """The running trainer of one policy. It does one thing at a time, in the order of the calls.

    A caller that is cancelled ends its wait, not the work.

    Gradients are accumulated un-normalised; `step` divides by the global divisors once (docs/math.md section 2,
    "deferred divisor"), so that the update equals the full-batch update whatever the split and the order.
    """

    @alters
    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads these rows where the trainer lives, and adds their gradient sums to the cache.

        Idempotent by micro-batch id since the last `step`. A call may be made while the last one is under way: its rows
        are read meanwhile, and it is worked on after that one. A call that raises has added nothing. Raises
        TrainingError, or StoreError if the rows cannot be read.
        """
        ...

    @alters
    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Open credit groups are complete: their samples were accumulated as two sums, of c g and of g.

        Adds scale x (sum of c g) + offset x (sum of g) by each group's line to the cache, or drops the sums where it is
        None. Returns the weighted tokens that are in the cache by this. A group without sums is no error. Once nothing
        is open and nothing weighted is in the cache, the ids of micro-batches may be used again: a step whose groups
        were all dropped ends without an update. Raises TrainingError.
        """
        ...

    @alters
    async def step(self, divisors: Divisors) -> UpdateReport:
        """One optimiser update from the cached sums, which are then cleared; returns what it was.

        Raises TrainingError, with the weights as they were, if there is nothing to divide by, a credit group is open,
        or a gradient is not finite.
        """
        ...

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets the current weights in the object store; `version` must be the trainer's own."""
        ...

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Raw log-probabilities of the sampled tokens under the current weights, one [R] float32 array per sample."""
        ...

    async def appraise(self, batch: MicroBatch) -> list[Appraised]:
        """What the current weights' critic and the initial weights say, per sample; changes nothing.

        Called before credit, also while `accumulate` of other rows is under way. Raises TrainingError.
        """
        ...

    async def save(self, path: Path) -> None:
        """Writes weights, optimiser, schedule and version into the folder `path`, which it makes."""
        ...

    @restores
    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, bit for bit; returns the version. Raises CheckpointError."""
        ...

    async def export(self, path: Path) -> None:
        """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""
        ...
