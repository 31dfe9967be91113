"""Trainer on one device in this process: a Hugging Face causal LM and AdamW."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.errors import CheckpointError, TrainingError, boundary
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
from flexmarl.records import Divisors, FloatArray, LossReport, MicroBatch, PolicyName, Sample, Version
from flexmarl.training.aggregation import divisor, token_weights
from flexmarl.training.backends.causal_lm import (
    DTYPES,
    Updater,
    move_and_cast,
    precision,
    prepare_for_training,
    unique_tensors,
)
from flexmarl.training.backends.forward import plan, run
from flexmarl.training.backends.gradients import GradientCache
from flexmarl.training.free_space import require_space
from flexmarl.training.interface import UpdateReport
from flexmarl.training.objective import Objective
from flexmarl.training.settings import TrainingSettings

P = ParamSpec("P")
T = TypeVar("T")


class SavesPretrained(Protocol):
    """A tokenizer, as far as an export needs one."""

    def save_pretrained(self, save_directory: str) -> object:
        """Writes it into a folder."""
        ...


class SingleProcessTrainer:
    """One policy on one device. The model belongs to the trainer from here on: it is cast, moved and updated in place.

    Log-probabilities are those of the model at temperature 1, to be compared with `Turn.raw_logprobs`: sampling at
    another temperature or with filters is then off-policy. What the ratio is to, and what else a token's loss is
    multiplied by, is the correction's decision.

    Memory per parameter in float32: weight 4, gradients of the micro-batch 4, gradient cache 4, AdamW 8 bytes. The two
    gradients are apart, so that a micro-batch that fails half-way leaves the cache as it was.
    """

    def __init__(
        self,
        policy: PolicyName,
        model: PreTrainedModel,
        settings: TrainingSettings,
        objects: ObjectStore,
        *,
        thread: DeviceThread | None = None,
        tokenizer: SavesPretrained | None = None,
        device: str = "cpu",
        version: int = 0,
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._objects = objects
        self._thread = thread
        self._tokenizer = tokenizer
        self._model = model
        move_and_cast(model, torch.device(device), DTYPES[settings.dtype])
        prepare_for_training(self._model, activation_checkpointing=settings.activation_checkpointing)
        self._updater = Updater(self._model, settings)
        self._version = Version(version)
        self._objective = Objective(settings)
        self._cache = GradientCache()
        self._reports: dict[str, LossReport] = {}
        self._last_update: UpdateReport | None = None

    @property
    def version(self) -> Version:
        """How many updates the weights have had."""
        return self._version

    @property
    def last_update(self) -> UpdateReport | None:
        """The latest update of this process."""
        return self._last_update

    async def accumulate(self, batch: MicroBatch) -> LossReport:
        """Adds the batch's gradient sums to the cache, one forward pass after the other.

        Each pass is its own piece of work for the device thread: an engine's decode steps get in between.
        """
        if batch.policy != self._policy:
            raise TrainingError(
                f"{batch.micro_batch_id} is of policy '{batch.policy}', this trainer's is '{self._policy}'"
            )
        if batch.micro_batch_id in self._reports:
            return self._reports[batch.micro_batch_id]
        started = time.perf_counter()
        loss = self._settings.loss
        weights = token_weights(batch.samples, loss.aggregation, loss.horizon_tokens)
        skip_zero = self._settings.skip_zero_advantage and self._objective.skips_zero_advantages
        trained = [
            (sample, weight)
            for sample, weight in zip(batch.samples, weights.tolist(), strict=True)
            if weight and (sample.teaches or not skip_zero)
        ]
        with boundary(TrainingError, f"{self._where}: accumulating micro-batch {batch.micro_batch_id}"):
            await self._run(self._updater.take_gradients)
            sums = [
                await self._run(self._forward_backward, [trained[i] for i in together.rows])
                for together in plan([sample for sample, _ in trained], self._settings)
            ]
            return await self._run(self._commit, batch, sums, started)

    async def step(self, divisors: Divisors) -> Version:
        """Divides by kappa D, clips, and updates."""
        return await self._run(self._step, divisors)

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Sets `weights/{policy}/{version}`: the model's state dict by its own names, without tied duplicates."""
        if version != self._version:
            raise TrainingError(f"{self._where}: asked to publish version {version}, the weights are {self._version}")
        meta = await self._objects.set(
            ObjectKey(f"weights/{self._policy}/{version}"), dict(unique_tensors(self._model))
        )
        return meta.key, meta.checksum

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Raw log-probabilities of the sampled tokens."""
        found = [np.zeros(0, dtype=np.float32) for _ in batch.samples]
        filled = [i for i, sample in enumerate(batch.samples) if sample.num_tokens]
        samples = [batch.samples[i] for i in filled]
        for together in plan(samples, self._settings):
            rows = together.rows
            flat = await self._run(self._forward, [samples[i] for i in rows])
            for i, values in zip(rows, np.split(flat, np.cumsum([samples[i].num_tokens for i in rows])), strict=False):
                found[filled[i]] = values
        return found

    async def save(self, path: Path) -> None:
        """Writes `weights.safetensors` (float32 masters of a bfloat16 model) and `trainer.pt`."""
        with boundary(CheckpointError, f"{self._where}: saving to {path}"):
            await self._run(self._save, path)

    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, the gradient cache included."""
        with boundary(CheckpointError, f"{self._where}: loading {path}"):
            await self._run(self._load, path)
        return self._version

    async def export(self, path: Path) -> None:
        """Writes the model, and the tokenizer if there is one, as a Hugging Face folder."""
        with boundary(CheckpointError, f"{self._where}: exporting to {path}"):
            await self._run(self._model.save_pretrained, path)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(str(path))

    @property
    def _where(self) -> str:
        return f"policy '{self._policy}' at version {self._version}"

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.run(work, *args, **kwargs) if self._thread else work(*args, **kwargs)

    def _forward_backward(self, rows: Sequence[tuple[Sample, float]]) -> Tensor:
        samples = [sample for sample, _ in rows]
        with precision(self._model):
            outputs = run(self._model, samples)
            loss, sums = self._objective(samples, [weight for _, weight in rows], outputs, version=self._version)
            (loss * self._settings.accumulation_scale).backward()
        return sums

    def _commit(self, batch: MicroBatch, sums: Sequence[Tensor], started: float) -> LossReport:
        if sums:
            self._cache.add(self._updater.take_gradients())
        names = self._objective.names
        totals = torch.stack(list(sums)).sum(0).tolist() if sums else [0.0] * len(names)
        report = LossReport(
            micro_batch_id=batch.micro_batch_id,
            num_samples=len(batch.samples),
            num_tokens=sum(sample.weight * sample.num_tokens for sample in batch.samples),
            sums=dict(zip(names, totals, strict=True)),
            duration_s=time.perf_counter() - started,
        )
        self._reports[batch.micro_batch_id] = report
        return report

    def _step(self, divisors: Divisors) -> Version:
        total = divisor(divisors, self._settings.loss.aggregation)
        if not self._reports or total <= 0:
            raise TrainingError(
                f"{self._where}: nothing to update from: {len(self._reports)} micro-batches, {divisors} and hence D = "
                f"{total}; leave the policy at its version for this step"
            )
        # A batch whose advantages are all 0 has gradient 0, and is still an update (momentum, weight decay).
        gradients = self._cache.sums or self._updater.take_gradients()
        torch._foreach_div_(gradients, self._settings.accumulation_scale * total)
        norm, learning_rate = self._updater.apply(gradients, self._version, self._where)
        self._version = Version(self._version + 1)
        self._last_update = self._report(total, norm, learning_rate)
        self._cache.clear()
        self._reports = {}
        return self._version

    def _report(self, total: float, norm: float, learning_rate: float) -> UpdateReport:
        reports = self._reports.values()
        measured = sum(report.sums["measured_tokens"] for report in reports)
        return UpdateReport(
            version=self._version,
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
            loss=sum(report.sums["loss"] for report in reports) / total,
            grad_norm=norm,
            learning_rate=learning_rate,
            means={n: sum(r.sums[n] for r in reports) / measured for n in self._objective.measures} if measured else {},
        )

    @torch.no_grad()
    def _forward(self, samples: Sequence[Sample]) -> FloatArray:
        with precision(self._model):
            logprobs = run(self._model, samples).logprobs
        return logprobs.float().cpu().numpy()

    def _save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        require_space(path, self._checkpoint_bytes(), f"the state of policy '{self._policy}'")
        save_file({n: t.detach().contiguous() for n, t in self._updater.masters.items()}, path / "weights.safetensors")
        state = {
            "policy": self._policy,
            "version": self._version,
            "optimizer": self._updater.optimizer.state_dict(),
            "cache": self._cache.sums,
            "reports": [asdict(report) for report in self._reports.values()],
        }
        torch.save(state, path / "trainer.pt")

    def _checkpoint_bytes(self) -> int:
        tensors = [*self._updater.masters.values(), *self._cache.tensors]
        tensors += [value for values in self._updater.optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def _load(self, path: Path) -> None:
        weights = load_file(path / "weights.safetensors")
        state = torch.load(path / "trainer.pt", map_location=self._model.device, weights_only=True)
        masters = self._updater.masters
        if weights.keys() != masters.keys():
            differing = sorted(weights.keys() ^ masters.keys())
            raise CheckpointError(f"{path} is of another model: only one of the two has {', '.join(differing[:5])}")
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(weights[name])
        self._updater.refresh()
        self._updater.optimizer.load_state_dict(state["optimizer"])
        self._version = Version(state["version"])
        self._cache.sums = state["cache"]
        self._reports = {report["micro_batch_id"]: LossReport(**report) for report in state["reports"]}
