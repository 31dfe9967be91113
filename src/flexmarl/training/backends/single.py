"""Trainer on one device in this process: a Hugging Face causal LM and AdamW."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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
    token_logprobs,
    trained_logits,
    unique_tensors,
)
from flexmarl.training.batching import PaddedRows, pad, plan_passes
from flexmarl.training.corrections.base import Sampled
from flexmarl.training.free_space import require_space
from flexmarl.training.interface import UpdateReport
from flexmarl.training.settings import TrainingSettings

P = ParamSpec("P")
T = TypeVar("T")

MEASURED = ("clipped", "kl_to_sampler", "entropy")


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
        self._cache: list[Tensor] | None = None
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
        skip_zero = self._settings.skip_zero_advantage and loss.zero_advantage_is_zero_gradient
        trained = [
            (sample, weight)
            for sample, weight in zip(batch.samples, weights.tolist(), strict=True)
            if weight and (sample.advantage or not skip_zero)
        ]
        with boundary(TrainingError, f"{self._where}: accumulating micro-batch {batch.micro_batch_id}"):
            await self._run(self._updater.take_gradients)
            sums = [
                await self._run(self._forward_backward, [trained[i] for i in rows])
                for rows in self._plan([sample for sample, _ in trained])
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
        for rows in self._plan(samples):
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
    def _measured(self) -> tuple[str, ...]:
        return (*MEASURED, *self._settings.correction.measures)

    @property
    def _where(self) -> str:
        return f"policy '{self._policy}' at version {self._version}"

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.run(work, *args, **kwargs) if self._thread else work(*args, **kwargs)

    def _plan(self, samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
        lengths = np.array([len(s.turn.prompt_ids) + s.num_tokens for s in samples], dtype=np.int64)
        return plan_passes(lengths, self._settings.max_tokens_per_forward)

    def _forward_backward(self, rows: Sequence[tuple[Sample, float]]) -> Tensor:
        samples = [sample for sample, _ in rows]
        correction = self._settings.correction
        recorded = torch.from_numpy(np.concatenate([s.turn.raw_logprobs for s in samples])).to(self._model.device)
        drawn_from = torch.from_numpy(np.concatenate([s.turn.logprobs for s in samples])).to(self._model.device)
        token = self._per_token(samples, self._model.device)
        with precision(self._model):
            logprobs, entropy = token_logprobs(*trained_logits(self._model, _padded(samples)))
            tokens = Sampled(
                current=logprobs.detach(),
                recorded=recorded.to(logprobs.dtype),
                drawn_from=drawn_from.to(logprobs.dtype),
                fresh=token([_all_at(self._version, sample) for sample in samples], torch.bool),
            )
            advantages = token([s.advantage for s in samples], logprobs.dtype)
            losses, clipped = self._settings.loss.per_token(logprobs, correction.old_logprobs(tokens), advantages)
            weights = token([weight for _, weight in rows], logprobs.dtype) * correction.weights(tokens)
            loss = (losses * weights).sum()
            (loss * self._settings.accumulation_scale).backward()
        with torch.no_grad():
            row_weights = token([s.weight for s in samples], logprobs.dtype)
            drift = (logprobs - recorded).clamp(-20, 20)
            measured = (torch.ones_like(entropy), clipped.to(entropy.dtype), drift.exp() - 1 - drift, entropy)
            measured += correction.measured(tokens)
            return torch.stack([loss.detach(), *(row_weights @ values for values in measured)]).double()

    def _per_token(self, samples: Sequence[Sample], device: torch.device) -> Callable[[list, torch.dtype], Tensor]:
        counts = torch.tensor([s.num_tokens for s in samples])
        row_of_token = torch.arange(len(samples)).repeat_interleave(counts)
        return lambda values, dtype: torch.tensor(values, dtype=dtype)[row_of_token].to(device)

    def _commit(self, batch: MicroBatch, sums: Sequence[Tensor], started: float) -> LossReport:
        if sums:
            gradients = self._updater.take_gradients()
            if self._cache is None:
                self._cache = gradients
            else:
                torch._foreach_add_(self._cache, gradients)
        totals = torch.stack(list(sums)).sum(0).tolist() if sums else [0.0] * (2 + len(self._measured))
        report = LossReport(
            micro_batch_id=batch.micro_batch_id,
            num_samples=len(batch.samples),
            num_tokens=sum(sample.weight * sample.num_tokens for sample in batch.samples),
            sums=dict(zip(("loss", "measured_tokens", *self._measured), totals, strict=True)),
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
        gradients = self._updater.take_gradients() if self._cache is None else self._cache
        torch._foreach_div_(gradients, self._settings.accumulation_scale * total)
        norm, learning_rate = self._updater.apply(gradients, self._version, self._where)
        self._version = Version(self._version + 1)
        self._last_update = self._report(total, norm, learning_rate)
        self._cache, self._reports = None, {}
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
            means={name: sum(r.sums[name] for r in reports) / measured for name in self._measured} if measured else {},
        )

    @torch.no_grad()
    def _forward(self, samples: Sequence[Sample]) -> FloatArray:
        with precision(self._model):
            logprobs, _ = token_logprobs(*trained_logits(self._model, _padded(samples)))
        return logprobs.float().cpu().numpy()

    def _save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        require_space(path, self._checkpoint_bytes(), f"the state of policy '{self._policy}'")
        save_file({n: t.detach().contiguous() for n, t in self._updater.masters.items()}, path / "weights.safetensors")
        state = {
            "policy": self._policy,
            "version": self._version,
            "optimizer": self._updater.optimizer.state_dict(),
            "cache": self._cache,
            "reports": [asdict(report) for report in self._reports.values()],
        }
        torch.save(state, path / "trainer.pt")

    def _checkpoint_bytes(self) -> int:
        tensors = [*self._updater.masters.values(), *(self._cache or ())]
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
        self._cache = state["cache"]
        self._reports = {report["micro_batch_id"]: LossReport(**report) for report in state["reports"]}


def _all_at(version: Version, sample: Sample) -> bool:
    return all(run.version == version for run in sample.turn.versions)


def _padded(samples: Sequence[Sample]) -> PaddedRows:
    return pad(
        [np.concatenate((s.turn.prompt_ids, s.turn.response_ids)) for s in samples],
        [np.arange(len(s.turn.prompt_ids) + s.num_tokens) >= len(s.turn.prompt_ids) for s in samples],
    )
