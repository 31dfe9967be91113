"""Trainer in a worker's process, beside a client of the store from which it reads its rows itself."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.errors import TrainingError, boundary
from flexmarl.experience.interface import ExperienceStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.interface import Trainer, UpdateReport
from flexmarl.training.rows import read_micro_batch


class TrainerHost:
    """What a worker hosts for one trainer; its other half is the RemoteTrainer that calls it.

    The trainer does one thing at a time, also when the controller has given up waiting for the last.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: ExperienceStore,
        policy: PolicyName,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Trainer and store are the host's own from here on; `on_close` frees what was made for them."""
        self._trainer, self._store, self._policy, self._on_close = trainer, store, policy, on_close
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

    async def close(self) -> None:
        """Waits for the work under way, leaves the store and frees the device."""
        async with self._turn:
            await self._store.close()
            self._on_close()


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
        thread = DeviceThread(f"trainer-{policy}")
        return TrainerHost(make_trainer(thread), open_store(), policy, on_close=thread.close)
