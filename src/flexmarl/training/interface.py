"""Interface of trainers, and of the readers that give them their rows: samples do not pass through the controller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flexmarl.cluster.proxy import alters, restores
from flexmarl.errors import StoreError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.turn_rows import sample_from_row, turn_from_row
from flexmarl.objects.interface import Checksum
from flexmarl.records import CreditLine, Divisors, FloatArray, LossReport, MicroBatch, Sample, SampleId, Turn, Version

FloatArray64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimiser update."""

    version: Version
    """The version that the update made."""
    num_samples: int
    num_tokens: float
    """Weighted sampled tokens of the batch."""
    loss: float
    """S / D of docs/math.md section 1."""
    grad_norm: float
    """L2 norm of the divided gradient, before clipping."""
    learning_rate: float
    means: Mapping[str, float] = field(default_factory=dict)
    """`clipped`, `kl_to_sampler`, `entropy`, and the figures of the correction, each a mean per weighted token of the
    rows that went through the model."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraised:
    """Figures of one turn of R sampled tokens that only a trainer can compute, asked for before it is credited."""

    values: FloatArray | None
    """[R] float32: the critic's value in front of each sampled token; None without a critic."""
    reference: FloatArray | None
    """[R] float32: each token's raw log-probability under the initial weights; None where no setting compares."""
    divergence: FloatArray64 | None = None
    """[R] float64: each token's divergence from `reference` (training.kl.type), from the raw log-probability that the
    engine recorded, that is under the weights that sampled it; None unless the reward pays for it."""


class Trainer(Protocol):
    """The running trainer of one policy. It does one thing at a time, in the order of the calls.

    A caller that is cancelled ends its wait, not the work.

    Gradients are accumulated un-normalised; `step` divides by the global divisors once (docs/math.md section 2,
    "deferred divisor"), so that the update equals the full-batch update whatever the split and the order.
    """

    @alters
    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads these rows where the trainer lives, and adds their gradient sums to the cache.

        Idempotent by micro-batch id since the last `step`. A call may be made while the previous one runs: its rows are
        read at once, and its work begins after that call. A call that raises has added nothing. Raises TrainingError,
        or StoreError if the rows cannot be read.
        """
        ...

    @alters
    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes open credit groups, whose samples were accumulated as two sums: of c g and of g.

        For each group with a line, adds scale x (sum of c g) + offset x (sum of g) to the cache; for None, drops both
        sums. Returns the weighted tokens that this adds to the cache. Groups without sums are ignored. When no group is
        open and the cache holds no weighted token, the ids of micro-batches may be used again: a step whose groups were
        all dropped ends without an update. Raises TrainingError.
        """
        ...

    @alters
    async def step(self, divisors: Divisors) -> UpdateReport:
        """Makes one optimiser update from the cached sums, clears them, and returns the report of the update.

        Raises TrainingError and leaves the weights as they were if there is nothing to divide by, a credit group is
        open, or a gradient is not finite.
        """
        ...

    async def publish(self, version: Version) -> Checksum:
        """Sets the current weights in the object store, under `weights_key`. `version` must be the trainer's own."""
        ...

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Returns raw log-probabilities of sampled tokens under the current weights: [R] float32 for each sample."""
        ...

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Reads these rows where the trainer lives; returns the figures of critic and initial weights, in order.

        Changes nothing. Called before credit, also while `accumulate` of other rows runs. Raises TrainingError,
        or StoreError if the rows cannot be read.
        """
        ...

    @alters
    async def reset_reference(self) -> None:
        """Makes the present weights the reference of `training.kl`, and empties the optimiser's state.

        Called between steps, when no gradient is accumulated. The divergence of rows is then 0 until the next update.
        Raises TrainingError if the policy has no reference, or if gradients are accumulated.
        """
        ...

    async def save(self, path: Path) -> None:
        """Writes weights, optimiser, schedule and version into the folder `path`, which it makes."""
        ...

    @restores
    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, bit for bit; returns the version. Raises CheckpointError."""
        ...

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes a Hugging Face folder: a model that `AutoModelForCausalLM.from_pretrained` loads, or its adapter.

        `form` None: as the settings say. A policy without an adapter is whole in any form.
        """
        ...


class RowReader(Protocol):
    """Source of a trainer's rows."""

    async def read(self, ids: Sequence[SampleId]) -> tuple[Sample, ...]:
        """The rows of these ids as training sees them, in this order. Raises StoreError for an unknown id."""
        ...

    async def turns(self, ids: Sequence[SampleId]) -> tuple[Turn, ...]:
        """The turns of these rows, which need no credit yet, in this order. Raises StoreError for an unknown id."""
        ...


class StoreRows:
    """Rows of an experience store."""

    def __init__(self, store: ExperienceStore) -> None:
        self._store = store

    async def read(self, ids: Sequence[SampleId]) -> tuple[Sample, ...]:
        """Reads them from the store."""
        return tuple(sample_from_row(row) for row in await self._store.get(ids))

    async def turns(self, ids: Sequence[SampleId]) -> tuple[Turn, ...]:
        """Reads them from the store."""
        return tuple(turn_from_row(row) for row in await self._store.get(ids))


class HeldRows:
    """Samples in memory, by their ids. It serves tests and benchmarks of trainers without a store."""

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        self._samples: dict[SampleId, Sample] = {}
        self.hold(samples)

    def hold(self, samples: Sequence[Sample]) -> None:
        """Adds samples. A sample replaces an earlier one with the same id."""
        self._samples |= {sample.turn.sample_id: sample for sample in samples}

    async def read(self, ids: Sequence[SampleId]) -> tuple[Sample, ...]:
        """Reads them from memory."""
        if missing := [sample_id for sample_id in ids if sample_id not in self._samples]:
            raise StoreError(f"no row '{missing[0]}' is held; there are {len(self._samples)} rows")
        return tuple(self._samples[sample_id] for sample_id in ids)

    async def turns(self, ids: Sequence[SampleId]) -> tuple[Turn, ...]:
        """Takes the turns of the samples from memory."""
        return tuple(sample.turn for sample in await self.read(ids))
