"""Trainer on a modelled device: its weight is one number, and what it does takes the time that its costs say.

A row's gradient is the sum of its advantages over its tokens, and a step adds sum / N_tok to the weight: enough to see
whether each row entered one update (law 5), in whatever split (law 2), and whether a resumed run ends the same (law 6).
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from flexmarl.cluster.allocation import Lease
from flexmarl.errors import CheckpointError, TrainingError, WorkerError, boundary
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
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
from flexmarl.simulator.costs import TrainerCosts
from flexmarl.simulator.cpu_share import CpuShare
from flexmarl.simulator.modelled_cache import ModelledCache
from flexmarl.training.interface import Appraised, UpdateReport
from flexmarl.training.rows import HeldRows, RowReader


class ModelledTrainer:
    """`Trainer` in virtual time. Work that has begun keeps the pace that its machine had then."""

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
        """Its state is on devices from the start; a ModelledProcessGroup sets it aside."""
        self.rows: RowReader = rows or HeldRows()
        """Where `accumulate` reads; may be exchanged before the first call."""
        self._turn = asyncio.Lock()
        """Held by the one call that is worked on; the others get it in their order."""
        self.policy = policy
        self.costs = costs
        self.weight = 0.0
        self.version = Version(0)
        self.busy_s = 0.0
        """Seconds of its devices at work: micro-batches and updates that ended."""
        self.on_devices = True
        self._objects = objects
        self._host = host or CpuShare()
        self.cache = ModelledCache(policy) if cache is None else cache
        """What was accumulated since the last update."""
        self._lost = ""
        self._calls: list[asyncio.Future[None]] = []
        """That run."""

    def fail(self, because: str) -> None:
        """A fault: its process dies. Every call that runs, and every later one, raises WorkerError."""
        self._lost = f"trainer/{self.policy} died: {because}"
        for call in self._calls:
            if not call.done():
                call.set_exception(WorkerError(self._lost))

    def lose_cache(self) -> None:
        """A fault: the gradient sums are gone, and nothing says so until the update misses them."""
        self.cache.clear()

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads the rows, also while others are worked on, and accumulates them."""
        reading = asyncio.create_task(self.rows.read(ids), name=f"read-{micro_batch_id}")
        try:
            async with self._turn:
                batch = MicroBatch(micro_batch_id=micro_batch_id, policy=self.policy, samples=await reading)
                return await self._accumulate(batch)
        finally:
            reading.cancel()

    async def accumulate_batch(self, batch: MicroBatch) -> LossReport:
        """As `accumulate`, of rows that are here already."""
        async with self._turn:
            return await self._accumulate(batch)

    async def _accumulate(self, batch: MicroBatch) -> LossReport:
        """Sums weight x advantage x tokens."""
        self._check_on_devices()
        if batch.policy != self.policy:
            raise TrainingError(f"policy '{self.policy}': {batch.micro_batch_id} is of policy '{batch.policy}'")
        if known := self.cache.report(batch.micro_batch_id):
            return known
        return self.cache.add(batch, duration_s=await self.compute(batch))

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Takes no time: a real one adds up two buffers."""
        async with self._turn:
            return await self._close_groups(lines)

    async def _close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        self._check_on_devices()
        return self.cache.close(lines)

    async def compute(self, batch: MicroBatch) -> float:
        """Takes the time of a micro-batch, in seconds; what it says is in no cache yet."""
        tokens = sum(len(s.turn.prompt_ids) + s.num_tokens for s in batch.samples)
        costs = self.costs
        return await self._work(costs.micro_batch_s + costs.sample_s * len(batch.samples) + costs.token_s * tokens)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """weight += gradient / N_tok."""
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

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets `weights/{policy}/{version}`: the weight, and the version, so that no two of them have one checksum."""
        async with self._turn:
            return await self._publish(version)

    async def _publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        if version != self.version:
            raise TrainingError(f"policy '{self.policy}' is at version {self.version}, asked to publish {version}")
        await self._spend(self.costs.publish_s)
        tree = {"weight": torch.tensor([self.weight], dtype=torch.float64), "version": torch.tensor(int(version))}
        meta = await self._objects.set(ObjectKey(f"weights/{self.policy}/{version}"), tree)
        return meta.key, meta.checksum

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """What the engine recorded."""
        self._check_alive()
        return [sample.turn.raw_logprobs for sample in batch.samples]

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Reads the rows, takes the time of their tokens, and returns the opinion of each.

        Also while it is set aside: the swaps that a real one would need for this are not modelled.
        """
        turns = await self.rows.turns(ids)
        await self._spend(self.costs.token_s * sum(len(turn.prompt_ids) + turn.num_tokens for turn in turns))
        return [self.opinion(turn) for turn in turns]

    def opinion(self, turn: Turn) -> Appraised:
        """Values of 0, and a reference that agrees with the engine."""
        values, divergence = np.zeros(turn.num_tokens, dtype=np.float32), np.zeros(turn.num_tokens)
        return Appraised(values=values, reference=turn.raw_logprobs, divergence=divergence)

    async def save(self, path: Path) -> None:
        """Writes `trainer.json`; also while it is set aside."""
        async with self._turn:
            await self._save(path)

    async def _save(self, path: Path) -> None:
        self._check_alive()
        text = json.dumps({"weight": self.weight, "version": self.version, **self.cache.state()})
        _write(path, "trainer.json", text)

    async def load(self, path: Path) -> Version:
        """Reads `trainer.json`."""
        async with self._turn:
            return await self._load(path)

    async def _load(self, path: Path) -> Version:
        self._check_alive()
        with boundary(CheckpointError, f"policy '{self.policy}': loading {path}"):
            state = json.loads((path / "trainer.json").read_text())
        self.weight, self.version = state["weight"], Version(state["version"])
        self.cache.load(state)
        return self.version

    async def export(self, path: Path) -> None:
        """Writes a folder with the weight in it."""
        self._check_alive()
        _write(path, "weight.txt", repr(self.weight))

    def set_aside(self) -> None:
        """Takes its state off the devices, before anything has begun."""
        self.on_devices = False

    async def swap(self, *, on_devices: bool) -> None:
        """Brings its state onto devices, or sets it aside: off them from the first moment, on them at the last."""
        self.on_devices = False
        await self._spend(self.costs.resume_s if on_devices else self.costs.suspend_s)
        self.on_devices = on_devices

    async def _work(self, seconds: float) -> float:
        """Keeps the devices busy for so long on a machine of their own; returns what it took on this one."""
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
    """`ProcessGroup` of a simulated trainer, set aside when it is made."""

    def __init__(self, trainer: ModelledTrainer) -> None:
        self._trainer = trainer
        trainer.set_aside()

    @property
    def policy(self) -> PolicyName:
        """Whose it is."""
        return self._trainer.policy

    async def resume(self, lease: Lease) -> None:
        """Takes `resume_s`, at any place."""
        await self._trainer.swap(on_devices=True)

    async def suspend(self) -> None:
        """Takes `suspend_s`."""
        await self._trainer.swap(on_devices=False)


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
