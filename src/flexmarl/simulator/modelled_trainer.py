"""Trainer on a modelled device: its weights are one number, and each call takes the time that the costs give.

A row's gradient is its weight x advantage x number of tokens, and a step adds sum / N_tok to the trainer's number.
That is enough to test that each row enters exactly one update (law 5), that the split into micro-batches does not
matter (law 2), and that a resumed run ends with the same weights (law 6).
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flexmarl.analysis.costs import TrainerCosts
from flexmarl.cluster.allocation import Lease
from flexmarl.errors import CheckpointError, TrainingError, WorkerError, boundary
from flexmarl.objects.interface import Checksum, ObjectStore, weights_key
from flexmarl.records import (
    CreditLine,
    Divisors,
    FloatArray,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Turn,
    Version,
)
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_cache import ModelledCache
from flexmarl.training.group import Devices
from flexmarl.training.interface import Appraised, HeldRows, RowReader, UpdateReport


class ModelledTrainer:
    """`Trainer` in virtual time. A call's duration is fixed when it starts, whatever the host's load is later."""

    def __init__(
        self,
        policy: PolicyName,
        costs: TrainerCosts,
        objects: ObjectStore,
        *,
        host: CpuShare | None = None,
        rows: RowReader | None = None,
        cache: ModelledCache | None = None,
    ) -> None:
        """The trainer's state is on devices from the start. A ModelledProcessGroup sets it aside."""
        self.rows: RowReader = rows or HeldRows()
        """The reader that gives `accumulate` its rows. It may be replaced before the first call."""
        self._turn = asyncio.Lock()
        """Held by the call in progress. Other calls get it in order of arrival."""
        self.policy = policy
        self.costs = costs
        self.weight = 0.0
        self.version = Version(0)
        self.busy_s = 0.0
        """Seconds that the devices spent on micro-batches and updates that have ended."""
        self.on_devices = True
        self._objects = objects
        self._host = host or CpuShare()
        self.cache = ModelledCache(policy) if cache is None else cache
        """The gradient sums since the last update."""
        self._lost = ""
        self._calls: list[asyncio.Future[None]] = []
        """Calls in progress; `fail` makes them raise."""

    def fail(self, because: str) -> None:
        """Injects a fault: the trainer's process dies. Running and later calls raise WorkerError."""
        self._lost = f"trainer/{self.policy} died: {because}"
        for call in self._calls:
            if not call.done():
                call.set_exception(WorkerError(self._lost))

    def lose_cache(self) -> None:
        """Injects a fault: the gradient sums are lost. Nothing reports it until an update misses them."""
        self.cache.clear()

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads the rows, even while another call is in progress, and accumulates them in turn."""
        reading = asyncio.create_task(self.rows.read(ids), name=f"read-{micro_batch_id}")
        try:
            async with self._turn:
                batch = MicroBatch(micro_batch_id=micro_batch_id, policy=self.policy, samples=await reading)
                return await self._accumulate(batch)
        finally:
            reading.cancel()

    async def accumulate_batch(self, batch: MicroBatch) -> LossReport:
        """Accumulates rows that have been read already."""
        async with self._turn:
            return await self._accumulate(batch)

    async def _accumulate(self, batch: MicroBatch) -> LossReport:
        """Adds weight x advantage x tokens of each row. A known micro-batch id only returns its first report."""
        self._check_on_devices()
        if batch.policy != self.policy:
            raise TrainingError(f"policy '{self.policy}': {batch.micro_batch_id} is of policy '{batch.policy}'")
        if known := self.cache.report(batch.micro_batch_id):
            return known
        return self.cache.add(batch, duration_s=await self.compute(batch))

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes credit groups. This takes no modelled time: a real trainer only adds two buffers."""
        async with self._turn:
            return await self._close_groups(lines)

    async def _close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        self._check_on_devices()
        return self.cache.close(lines)

    async def compute(self, batch: MicroBatch) -> float:
        """Waits for as long as the micro-batch takes, and returns those seconds. Adds nothing to the cache."""
        tokens = sum(len(s.turn.prompt_ids) + s.num_tokens for s in batch.samples)
        costs = self.costs
        return await self._work(costs.micro_batch_s + costs.sample_s * len(batch.samples) + costs.token_s * tokens)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates the number that stands for weights: weight += gradient / N_tok."""
        async with self._turn:
            return await self._step(divisors)

    async def _step(self, divisors: Divisors) -> UpdateReport:
        self._check_on_devices()
        self.cache.check(divisors, self.version)
        duration_s = await self._work(self.costs.update_s)
        sums = self.cache.take()
        gradient = sums.gradient / divisors.num_tokens
        self.weight += gradient
        self.version = Version(self.version + 1)
        return UpdateReport(
            version=self.version,
            num_samples=sums.num_samples,
            num_tokens=sums.num_tokens,
            loss=-gradient,
            grad_norm=abs(gradient),
            learning_rate=1.0,
            duration_s=duration_s,
        )

    async def publish(self, version: Version) -> Checksum:
        """Sets `weights_key(policy, version)` to the weight and the version, which makes every checksum different."""
        async with self._turn:
            return await self._publish(version)

    async def _publish(self, version: Version) -> Checksum:
        if version != self.version:
            raise TrainingError(f"policy '{self.policy}' is at version {self.version}, asked to publish {version}")
        await self._spend(self.costs.publish_s)
        tree = {"weight and version": torch.tensor([self.weight, float(version)], dtype=torch.float64)}
        return (await self._objects.set(weights_key(self.policy, version), tree)).checksum

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Returns the log-probabilities that the engine recorded."""
        self._check_alive()
        return [sample.turn.raw_logprobs for sample in batch.samples]

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Reads the rows, takes the time of their tokens, and returns the appraisal of each.

        Also while it is set aside: the swaps that a real one would need for this are not modelled.
        """
        turns = await self.rows.turns(ids)
        await self._spend(self.costs.token_s * sum(len(turn.prompt_ids) + turn.num_tokens for turn in turns))
        return [self.appraisal(turn) for turn in turns]

    def appraisal(self, turn: Turn) -> Appraised:
        """Values of 0, and a reference that agrees with the engine."""
        values, divergence = np.zeros(turn.num_tokens, dtype=np.float32), np.zeros(turn.num_tokens)
        return Appraised(values=values, reference=turn.raw_logprobs, divergence=divergence)

    async def reset_reference(self) -> None:
        """Takes no modelled time, and changes nothing that a modelled update depends on."""
        async with self._turn:
            self._check_alive()

    async def save(self, path: Path) -> None:
        """Writes `trainer.json`. This works without devices too."""
        async with self._turn:
            await self._save(path)

    async def _save(self, path: Path) -> None:
        self._check_alive()
        text = json.dumps({"weight": self.weight, "version": self.version, **self.cache.state()})
        _write(path, "trainer.json", text)

    async def load(self, path: Path) -> Version:
        """Restores the state from `trainer.json` and returns its version. Raises CheckpointError."""
        async with self._turn:
            return await self._load(path)

    async def _load(self, path: Path) -> Version:
        self._check_alive()
        with boundary(CheckpointError, f"policy '{self.policy}': loading {path}"):
            state = json.loads((path / "trainer.json").read_text())
            self.weight, self.version = state["weight"], Version(state["version"])
            self.cache.load(state)
        return self.version

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes the weight to `weight.txt` in this folder."""
        self._check_alive()
        _write(path, "weight.txt", repr(self.weight))

    def set_aside(self) -> None:
        """Takes the state off the devices at once; for use before the first call."""
        self.on_devices = False

    async def swap(self, *, on_devices: bool) -> None:
        """Brings the state onto devices, or sets it aside. During the swap it counts as off the devices."""
        self.on_devices = False
        await self._spend(self.costs.resume_s if on_devices else self.costs.suspend_s)
        self.on_devices = on_devices

    async def _work(self, seconds: float) -> float:
        """Keeps the devices busy for `seconds`, times the slowdown of a shared host; returns the seconds it took."""
        with self._host.busy_trainer():
            took_s = seconds * self._host.trainer_factor()
            await self._spend(took_s)
        self.busy_s += took_s
        return took_s

    async def _spend(self, seconds: float) -> None:
        self._check_alive()
        loop = asyncio.get_running_loop()
        call: asyncio.Future[None] = loop.create_future()
        self._calls.append(call)
        timer = loop.call_later(seconds, lambda: call.done() or call.set_result(None))
        try:
            await call
        finally:
            timer.cancel()
            self._calls.remove(call)

    def _check_alive(self) -> None:
        if self._lost:
            raise WorkerError(self._lost)

    def _check_on_devices(self) -> None:
        self._check_alive()
        if not self.on_devices:
            raise TrainingError(f"policy '{self.policy}' holds no devices; resume its process group first")


class ModelledProcessGroup:
    """`ProcessGroup` of a modelled trainer, whose state is set aside when the group is made."""

    def __init__(self, trainer: ModelledTrainer) -> None:
        self._trainer = trainer
        trainer.set_aside()

    @property
    def policy(self) -> PolicyName:
        """The trainer's policy."""
        return self._trainer.policy

    def join(self, devices: Devices) -> None:
        """Does nothing: a modelled trainer answers calls outside of its session while it is set aside."""

    async def resume(self, lease: Lease) -> None:
        """Brings the state onto devices in `resume_s`, whatever the place."""
        await self._trainer.swap(on_devices=True)

    async def suspend(self) -> None:
        """Sets the state aside in `suspend_s`."""
        await self._trainer.swap(on_devices=False)


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
