"""Trainer in another process: what `training/interface.py` asks, over the calls of one worker."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexmarl.cluster.interface import Worker
from flexmarl.credit.estimators.group_relative import Line
from flexmarl.errors import TrainingError, WorkerError
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.interface import Appraised, UpdateReport


class RemoteTrainer:
    """`Trainer` whose TrainerHost is in a worker's process; `accumulate_rows` has it read its rows there.

    A cancelled call ends the wait, not the work. Where that work may have changed the gradient cache, the cache is no
    longer known: every later call but `load` raises TrainingError, rather than let a row count twice or never.
    """

    def __init__(self, worker: Worker, policy: PolicyName) -> None:
        """Whoever spawned the worker also stops it."""
        self._worker, self._policy = worker, policy
        self._last_update: UpdateReport | None = None
        self._abandoned = ""

    @property
    def last_update(self) -> UpdateReport | None:
        """The latest update since this object was made."""
        return self._last_update

    async def accumulate(self, batch: MicroBatch) -> LossReport:
        """Sends the whole batch across."""
        return await self._change(f"micro-batch {batch.micro_batch_id}", "accumulate", batch)

    async def accumulate_rows(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Sends the ids of the rows; the trainer's process reads them from the store."""
        return await self._change(f"micro-batch {micro_batch_id}", "accumulate_rows", micro_batch_id, ids)

    async def close_groups(self, lines: Mapping[str, Line | None]) -> float:
        """Sends the lines; the sums are there."""
        return await self._change("closing credit groups", "close_groups", lines)

    async def step(self, divisors: Divisors) -> Version:
        """One update there; what it was comes back with the version."""
        version, self._last_update = await self._change("the update", "step", divisors)
        return version

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets the weights from where they are."""
        return await self._call("publish", version)

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Raw log-probabilities of the sampled tokens."""
        return await self._call("logprobs", batch)

    async def appraise(self, batch: MicroBatch) -> list[Appraised]:
        """Sends the whole batch across: its rows have no credit yet."""
        return await self._call("appraise", batch)

    async def save(self, path: Path) -> None:
        """Writes the folder from there."""
        await self._call("save", path)

    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, whatever was under way before."""
        self._abandoned = ""
        return await self._change("loading", "load", path)

    async def export(self, path: Path) -> None:
        """Writes the folder from there."""
        await self._call("export", path)

    async def _change(self, what: str, method: str, *args: Any) -> Any:
        try:
            return await self._call(method, *args)
        except asyncio.CancelledError:
            self._abandoned = what
            raise

    async def _call(self, method: str, *args: Any) -> Any:
        if self._abandoned:
            raise TrainingError(
                f"policy '{self._policy}': {self._abandoned} was cancelled while the trainer's process worked on it, "
                f"so its gradients are no longer known; go on from the last checkpoint with --resume"
            )
        try:
            return await self._worker.call(method, *args)
        except WorkerError as error:
            raise TrainingError(
                f"policy '{self._policy}': the trainer's process died in '{method}' ({error}); "
                f"go on from the last checkpoint with --resume"
            ) from error
