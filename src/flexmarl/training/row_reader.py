"""Rows of a micro-batch, read where the trainer lives: samples do not pass through the controller."""

from collections.abc import Sequence
from typing import Protocol

from flexmarl.errors import StoreError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.turn_rows import sample_from_row, turn_from_row
from flexmarl.records import Sample, SampleId, Turn


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
