"""A trainer of one number, and what every trainer must do."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from flexmarl.errors import CheckpointError, TrainingError, boundary
from flexmarl.experience.divisors import divisors_of
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, checksum
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, PolicyName, Version
from flexmarl.training.interface import Trainer, UpdateReport


class FakeTrainer:
    """Trains one weight: a row's gradient is the sum of its advantages over its tokens, and a step adds sum / N_tok.

    Pure asyncio: `sample_cost_s` is slept for every sample, so it also runs in virtual time. `fail_on` names the
    micro-batches that raise.
    """

    def __init__(
        self,
        policy: PolicyName,
        objects: ObjectStore,
        *,
        sample_cost_s: float = 0.0,
        fail_on: frozenset[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self.weight = 0.0
        self.version = Version(0)
        self.last_update: UpdateReport | None = None
        self.accumulated: list[MicroBatch] = []
        """Every micro-batch that entered a cache, in order, over all steps."""
        self._objects = objects
        self._sample_cost_s = sample_cost_s
        self._fail_on = fail_on
        self._reports: dict[str, LossReport] = {}

    async def accumulate(self, batch: MicroBatch) -> LossReport:
        """Sums weight x advantage x tokens, in exactly as much virtual time as the samples cost."""
        if batch.policy != self.policy:
            raise TrainingError(f"policy '{self.policy}': {batch.micro_batch_id} is of policy '{batch.policy}'")
        if batch.micro_batch_id in self._reports:
            return self._reports[batch.micro_batch_id]
        cost_s = self._sample_cost_s * len(batch.samples)
        await asyncio.sleep(cost_s)
        if batch.micro_batch_id in self._fail_on:
            raise RuntimeError(f"scripted failure on {batch.micro_batch_id}")
        report = LossReport(
            micro_batch_id=batch.micro_batch_id,
            num_samples=len(batch.samples),
            num_tokens=sum(s.weight * s.num_tokens for s in batch.samples),
            sums={"gradient": sum(s.weight * s.advantage * s.num_tokens for s in batch.samples)},
            duration_s=cost_s,
        )
        self._reports[batch.micro_batch_id] = report
        self.accumulated.append(batch)
        return report

    async def step(self, divisors: Divisors) -> Version:
        """weight += gradient / N_tok."""
        reports = self._reports.values()
        if not reports or divisors.num_tokens <= 0:
            raise TrainingError(
                f"policy '{self.policy}' at version {self.version}: nothing to update from ({divisors})"
            )
        gradient = sum(report.sums["gradient"] for report in reports) / divisors.num_tokens
        self.weight += gradient
        self.version = Version(self.version + 1)
        self.last_update = UpdateReport(
            version=self.version,
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
            loss=-gradient,
            grad_norm=abs(gradient),
            learning_rate=1.0,
        )
        self._reports = {}
        return self.version

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets `weights/{policy}/{version}` with the one tensor `weight`."""
        if version != self.version:
            raise TrainingError(f"policy '{self.policy}' is at version {self.version}, asked to publish {version}")
        tree = {"weight": torch.tensor([self.weight], dtype=torch.float64)}
        meta = await self._objects.set(ObjectKey(f"weights/{self.policy}/{version}"), tree)
        return meta.key, meta.checksum

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """What the engine recorded."""
        return [sample.turn.raw_logprobs for sample in batch.samples]

    async def save(self, path: Path) -> None:
        """Writes `trainer.json`."""
        reports = [asdict(report) for report in self._reports.values()]
        text = json.dumps({"weight": self.weight, "version": self.version, "reports": reports})
        _write(path, "trainer.json", text)

    async def load(self, path: Path) -> Version:
        """Reads `trainer.json`."""
        with boundary(CheckpointError, f"policy '{self.policy}': loading {path}"):
            state = json.loads((path / "trainer.json").read_text())
        self.weight, self.version = state["weight"], Version(state["version"])
        self._reports = {report["micro_batch_id"]: LossReport(**report) for report in state["reports"]}
        return self.version

    async def export(self, path: Path) -> None:
        """Writes a folder with the weight in it."""
        _write(path, "weight.txt", repr(self.weight))


async def check_trainer(
    make_trainer: Callable[[ObjectStore], Trainer], batches: Sequence[MicroBatch], folder: Path
) -> None:
    """Asserts the contract of `Trainer`: at least two micro-batches of one policy, sampled at version 0.

    `make_trainer` must return equal trainers at version 0 every time; `folder` is an empty one for checkpoints.
    """
    divisors = divisors_of(sample for batch in batches for sample in batch.samples)
    trainer = make_trainer(InlineObjectStore())

    await _refuses(TrainingError, trainer.step(divisors), "a step without any micro-batch")
    for batch in batches:
        report = await trainer.accumulate(batch)
        assert report.micro_batch_id == batch.micro_batch_id
        assert report.num_samples == len(batch.samples)
        assert np.isclose(report.num_tokens, sum(s.weight * s.num_tokens for s in batch.samples), rtol=1e-12)
        assert await trainer.accumulate(batch) == report, "accumulating an id again must return its first report"
    await _refuses(TrainingError, trainer.step(Divisors()), "a step with divisors of zero")

    logprobs = await trainer.logprobs(batches[0])
    for sample, values in zip(batches[0].samples, logprobs, strict=True):
        assert values.dtype == np.float32
        assert values.shape == (sample.num_tokens,), "one log-probability for every sampled token"

    await trainer.save(folder / "with_cache")
    assert await trainer.step(divisors) == 1, "the first update makes version 1"
    assert trainer.last_update is not None
    assert trainer.last_update.version == 1
    await _refuses(TrainingError, trainer.step(divisors), "a second step from sums that the first has used")
    await _refuses(TrainingError, trainer.publish(Version(0)), "publishing a version that is gone")
    updated = (await trainer.publish(Version(1)))[1]

    once = make_trainer(InlineObjectStore())
    for batch in batches:
        await once.accumulate(batch)
    await once.step(divisors)
    assert (await once.publish(Version(1)))[1] == updated, "accumulating an id again must change nothing"

    objects = InlineObjectStore()
    restored = make_trainer(objects)
    assert await restored.load(folder / "with_cache") == 0
    await restored.accumulate(batches[0])
    await restored.step(divisors)
    key, published = await restored.publish(Version(1))
    assert published == updated, "a restored trainer must go on bit for bit, gradient cache and its ids included"
    assert checksum(await objects.get(key)) == published, "the checksum must be that of the object"

    await _refuses(CheckpointError, restored.load(folder / "nowhere"), "loading a folder that is not there")
    await trainer.export(folder / "export")
    assert any((folder / "export").iterdir()), "an export is a folder with files"


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


async def _refuses(error: type[Exception], call: Awaitable[object], what: str) -> None:
    try:
        await call
    except error:
        return
    raise AssertionError(f"{what} must raise {error.__name__}")
