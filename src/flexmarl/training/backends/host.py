"""Trainer in a worker's process, beside a client of the store from which it reads its rows itself."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.credit.estimators.group_relative import Line
from flexmarl.errors import TrainingError, boundary
from flexmarl.experience.interface import ExperienceStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.interface import Appraised, Trainer, UpdateReport
from flexmarl.training.rows import read_micro_batch


class TrainerHost:
    """What a worker hosts for one trainer; its other half is the RemoteTrainer that calls it.

    The trainer does one thing at a time, also when the controller has given up waiting for the last.
    """

    def __init__(self, trainer: Trainer, store: ExperienceStore, policy: PolicyName) -> None:
        """They end with the process."""
        self._trainer, self._store, self._policy = trainer, store, policy
        self._turn = asyncio.Lock()

    async def accumulate(self, batch: MicroBatch) -> LossReport:
        """As the trainer does."""
        async with self._turn:
            return await self._trainer.accumulate(batch)

    async def accumulate_rows(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads the rows, also while the trainer works on others; accumulates in the order of the calls."""
        batch = asyncio.create_task(read_micro_batch(self._store, self._policy, micro_batch_id, ids), name="read-rows")
        async with self._turn:
            return await self._trainer.accumulate(await batch)

    async def close_groups(self, lines: Mapping[str, Line | None]) -> float:
        """As the trainer does, after the micro-batches that were sent before."""
        async with self._turn:
            return await self._trainer.close_groups(lines)

    async def step(self, divisors: Divisors) -> tuple[Version, UpdateReport | None]:
        """The new version, and what the update was."""
        async with self._turn:
            return await self._trainer.step(divisors), self._trainer.last_update

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """As the trainer does."""
        async with self._turn:
            return await self._trainer.publish(version)

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """As the trainer does."""
        async with self._turn:
            return await self._trainer.logprobs(batch)

    async def appraise(self, batch: MicroBatch) -> list[Appraised]:
        """As the trainer does."""
        async with self._turn:
            return await self._trainer.appraise(batch)

    async def save(self, path: Path) -> None:
        """As the trainer does."""
        async with self._turn:
            await self._trainer.save(path)

    async def load(self, path: Path) -> Version:
        """As the trainer does."""
        async with self._turn:
            return await self._trainer.load(path)

    async def export(self, path: Path) -> None:
        """As the trainer does."""
        async with self._turn:
            await self._trainer.export(path)


def host_trainer(
    *,
    policy: PolicyName,
    make_trainer: Callable[[DeviceThread], Trainer],
    open_store: Callable[[], ExperienceStore],
) -> TrainerHost:
    """Makes a trainer and its host, where it is called; with its arguments bound it is a `WorkerSpec.make`.

    Raises TrainingError, or what the arguments raise of ours.
    """
    with boundary(TrainingError, f"policies.{policy}.training: making a trainer"):
        return TrainerHost(make_trainer(DeviceThread(f"trainer-{policy}")), open_store(), policy)
