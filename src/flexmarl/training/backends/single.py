"""Trainer on one device in this process: a Hugging Face causal LM and AdamW."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.torch_device import returning_heap
from flexmarl.errors import CheckpointError, FlexmarlError, TrainingError, boundary
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, canary_key, weights_key
from flexmarl.records import (
    CreditLine,
    Divisors,
    FloatArray,
    LossReport,
    MicroBatch,
    PolicyName,
    Sample,
    SampleId,
    Turn,
    Version,
)
from flexmarl.training.aggregation import token_weights
from flexmarl.training.backends.causal_lm import Updater, some_of
from flexmarl.training.backends.gradients import Backward, GradientCache, OpenSums, Weighted
from flexmarl.training.backends.network import Network
from flexmarl.training.backends.objective import Objective
from flexmarl.training.backends.ranks import ALONE, Ranks
from flexmarl.training.backends.state import TrainerState, state_of, take_state
from flexmarl.training.backends.trainer_files import Counted, read_trainer, write_trainer
from flexmarl.training.interface import Appraised, RowReader, UpdateReport
from flexmarl.training.kl import divergence
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.cost import tree_figures
from flexmarl.training.tree.merge import PrefixTree

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Accumulating:
    """A micro-batch of which the passes are made. Nothing of it is in the cache yet."""

    batch: MicroBatch
    trained: list[Weighted]
    """Rows whose gradients go straight to the cache."""
    opened: list[Weighted]
    """Rows of open credit groups."""
    started: float
    sums: Sequence[Mapping[str, float]] = ()
    """The sums of each pass over `trained`."""
    gradients: list[Tensor] | None = None
    open_sums: Mapping[str, OpenSums] = field(default_factory=dict)


class SavesPretrained(Protocol):
    """The part of a tokenizer that an export needs."""

    def save_pretrained(self, save_directory: str) -> object:
        """Writes the tokenizer into a folder."""
        ...


class SingleProcessTrainer:
    """The trainer of one policy on one device. It owns the model: it casts, moves and updates it in place.

    Log-probabilities are those of the model at temperature 1, to be compared with `Turn.raw_logprobs`: sampling at
    another temperature or with filters is off-policy. The correction decides the denominator of the ratio and the
    weight of each token.

    Memory per parameter in float32: weight 4, gradients of the micro-batch 4, gradient cache 4, AdamW 8 bytes. The two
    gradients are apart, so that a micro-batch that fails half-way leaves the cache as it was. With `lora` only the
    adapter has more than its weights, and is all that a checkpoint holds.

    With several ranks, each process has such a trainer and the same calls are made of all of them, in the same order.
    Each computes its share of the rows and has its part of all of the above; reports are those of all rows.
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
        seed: int = 0,
        deterministic: bool = False,
        rows: RowReader | None = None,
        canary: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """`canary`: each version is published with one, for engines that want it (`canary_key`).

        `accumulate` and `appraise` read from `rows`; without it, only `accumulate_batch` and `appraise_turns` work.

        A new adapter begins from `seed`. With `deterministic`, equal rows give equal bits, on CUDA too.
        """
        self._policy, self._settings, self._objects = policy, settings, objects
        self._thread, self._tokenizer = thread, tokenizer
        self._ranks = ranks
        self._network = Network(model, settings, device=device, seed=seed, deterministic=deterministic, ranks=ranks)
        self._objective = Objective(settings)
        rate = None if settings.critic is None else settings.critic.learning_rate
        self._updater = Updater(model, settings, extra=self._network.extra, extra_rate=rate, ranks=ranks)
        scale = settings.accumulation_scale
        self._backward = Backward(self._network, self._objective, self._updater, scale=scale)
        self._version = Version(version)
        self._cache = GradientCache()
        self._reports: dict[str, LossReport] = {}
        self._rows = rows
        self._canaries: list[Version] | None = [] if canary else None
        """The versions whose canaries are in the object store; None if none are published."""
        self._turn = asyncio.Lock()
        """Held by the call that is being executed; waiting calls get it in their order."""
        self._failure = ""
        """The reason why the weights belong to no version any more; empty while they do."""
        self.reference_was_reset = True
        """False if the reference is still the one with which the trainer's state came back."""
        self._published_as: tuple[Version, Checksum] | None = None
        """The version whose weights were set last, and their checksum."""

    @property
    def turn(self) -> asyncio.Lock:
        """Held by the call that is being executed. Hold it for `begin`, `end_passes` and `commit`."""
        return self._turn

    @property
    def backward(self) -> Backward:
        """The part that makes gradients."""
        return self._backward

    @property
    def version(self) -> Version:
        """How many updates the weights have had."""
        return self._version

    @property
    def is_published(self) -> bool:
        """True if the weights of this version are set in the object store, as far as it knows."""
        return self._published_as is not None and self._published_as[0] == self._version

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Reads the rows at once, even while another call runs, and accumulates them in its turn."""
        if self._rows is None:
            raise TrainingError(f"{self._where}: it has no rows to read {micro_batch_id} from; give it `rows`")
        reading = asyncio.create_task(self._rows.read(ids), name=f"read-{micro_batch_id}")
        try:
            async with self._turn:
                samples = await reading
                return await self._accumulate(
                    MicroBatch(micro_batch_id=micro_batch_id, policy=self._policy, samples=samples)
                )
        finally:
            reading.cancel()

    async def accumulate_batch(self, batch: MicroBatch) -> LossReport:
        """Accumulates rows that are in memory already."""
        async with self._turn:
            return await self._accumulate(batch)

    async def _accumulate(self, batch: MicroBatch) -> LossReport:
        """Adds the batch's gradient sums to the cache, one forward pass after the other.

        Each pass is one piece of work of the device thread, so that decode steps of an engine run between passes.
        """
        with boundary(
            TrainingError, f"{self._where}: accumulating micro-batch {batch.micro_batch_id}", users_code=True
        ):
            work = await self.begin(batch)
            if isinstance(work, LossReport):
                return work
            sums = [
                await self._run(self._backward.add, work.trained, together, self._version)
                for together in await self._run(self._network.plan, [sample for sample, _ in work.trained])
            ]
            await self.end_passes(work, sums)
            return await self.commit(work)

    async def begin(self, batch: MicroBatch) -> Accumulating | LossReport:
        """Finds the rows of a micro-batch that need a pass, and drops what a pass that failed has left in gradients.

        Returns the report of a micro-batch that is accumulated already.
        """
        self._require_finite()
        if batch.policy != self._policy:
            raise TrainingError(
                f"{batch.micro_batch_id} is of policy '{batch.policy}', this trainer's is '{self._policy}'"
            )
        if batch.micro_batch_id in self._reports:
            return self._reports[batch.micro_batch_id]
        loss, started = self._settings.loss, time.perf_counter()
        weights = token_weights(batch.samples, loss.aggregation, loss.horizon_tokens)
        skip_zero = self._settings.skip_zero_advantage and self._objective.skips_zero_advantages
        weighted = [pair for pair in zip(batch.samples, weights.tolist(), strict=True) if pair[1]]
        trained = [pair for pair in weighted if not pair[0].open_group and (pair[0].has_gradient or not skip_zero)]
        await self._run(self._updater.take_gradients)
        opened = [pair for pair in weighted if pair[0].open_group]
        return Accumulating(batch=batch, trained=trained, opened=opened, started=started)

    async def end_passes(self, work: Accumulating, sums: Sequence[Mapping[str, float]]) -> None:
        """Takes the gradients of the passes over `work.trained`, which had these sums, and computes open groups."""
        work.sums = sums
        work.gradients = await self._run(self._updater.take_gradients) if sums else None
        work.open_sums = await self._open_sums(work.opened)

    async def commit(self, work: Accumulating) -> LossReport:
        """Adds the gradients of a micro-batch to the cache."""
        return await self._run(self._commit, work)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Combines the two sums of each group into one, and adds it to the cache."""
        async with self._turn:
            return await self._run(self._close_groups, lines)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Divides by kappa D, clips, and updates."""
        async with self._turn:
            return await self._run(self._step, divisors)

    async def publish(self, version: Version) -> Checksum:
        """Sets `weights_key(policy, version)`: the model's state dict by its own names, without tied duplicates.

        Weights that it has set already are not set again.
        """
        async with self._turn:
            if version != self._version:
                raise TrainingError(f"{self._where}: asked to publish {version}, the weights are {self._version}")
            self._require_finite()
            if self._published_as is not None and self._published_as[0] == version:
                return self._published_as[1]
            tensors = await self._run(self._published)
            if self._canaries is not None:
                await self._publish_canary(self._canaries, version)
            if self._ranks.world > 1:  # Ranks agree on every call before the next one begins.
                return await self._publish(version, tensors)
        return await self._publish(version, tensors)

    async def _publish(self, version: Version, tensors: Mapping[str, Tensor]) -> Checksum:
        checksum = await self._set(weights_key(self._policy, version), tensors)
        self._published_as = (version, checksum)
        return checksum

    async def _set(self, key: ObjectKey, tensors: Mapping[str, Tensor]) -> Checksum:
        """Sets an object from the first rank, which alone knows the checksum."""
        checksum, error = Checksum(""), None
        try:
            if self._ranks.is_first:
                checksum = (await self._objects.set(key, tensors)).checksum
        except FlexmarlError as raised:
            error = raised
        if self._ranks.world > 1:
            await self._run(self._ranks.agree, error)
        elif error is not None:
            raise error
        return checksum

    async def state(self) -> TrainerState:
        """The whole state. Its tensors are the trainer's own: copy them before it works on."""
        async with self._turn:
            state = await self._run(lambda: state_of(self._network, self._updater, self._cache))
        state.facts |= {"reports": dict(self._reports), "canaries": self._canaries}
        return state

    def take_state(self, state: TrainerState, version: Version, published: Checksum | None) -> None:
        """Takes a state over, for a new trainer whose model has the state's weights.

        `published` is the checksum of the version's weights, if they are set in the object store.
        """
        take_state(state, self._network, self._updater, self._cache)
        self._version, self._reports = version, dict(state.facts["reports"])
        self._canaries = state.facts["canaries"]
        self._published_as = None if published is None else (version, published)
        self.reference_was_reset = False

    async def _publish_canary(self, held: list[Version], version: Version) -> None:
        """Sets the canary, and releases those before the last one: an instance may still load the last version."""
        await self._set(canary_key(self._policy, version), await self._run(self._network.canary))
        held.append(version)
        while len(held) > 2:
            await self._objects.release(canary_key(self._policy, held.pop(0)))

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Raw log-probabilities of the sampled tokens."""
        async with self._turn:
            return await self._per_sample(batch.samples, self._network.logprobs)

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Reads the turns, and appraises them."""
        if self._rows is None:
            raise TrainingError(f"{self._where}: it has no rows to read {some_of(ids)} from; give it `rows`")
        if self._ranks.world == 1:
            return await self.appraise_turns(await self._rows.turns(ids))
        async with self._turn:  # From here on: ranks may read rows in different times, and must compute in one order.
            return await self._appraise(await self._rows.turns(ids))

    async def appraise_turns(self, turns: Sequence[Turn]) -> list[Appraised]:
        """Computes values with the current weights, and the reference's log-probabilities with the initial ones."""
        async with self._turn:
            return await self._appraise(turns)

    async def _appraise(self, turns: Sequence[Turn]) -> list[Appraised]:
        samples = [Sample(turn=turn, advantage=0.0) for turn in turns]
        network, nothing = self._network, [None] * len(samples)
        with boundary(TrainingError, f"{self._where}: appraising {some_of([turn.sample_id for turn in turns])}"):
            values = await self._per_sample(samples, network.values) if network.has_values else nothing
            reference = nothing
            if network.has_reference:
                reference = await self._per_sample(samples, network.reference_logprobs)
        return [
            Appraised(values=v, reference=r, divergence=None if r is None else self._divergence(turn, r))
            for turn, v, r in zip(turns, values, reference, strict=True)
        ]

    def _divergence(self, turn: Turn, reference: FloatArray) -> NDArray[np.float64] | None:
        if (kl := self._settings.kl) is None or kl.where != "reward":
            return None
        recorded, initial = (torch.from_numpy(of.astype(np.float64)) for of in (turn.raw_logprobs, reference))
        return divergence(kl.type, recorded, initial).numpy()

    async def reset_reference(self) -> None:
        """Copies the weights, or the adapter, to the reference."""
        async with self._turn:
            self._require_finite()
            if self._cache.tensors:
                raise TrainingError(f"{self._where}: gradients are accumulated, so the reference cannot be reset now")
            with boundary(TrainingError, f"{self._where}: resetting the reference"):
                await self._run(self._network.reference.reset)
                self._updater.optimizer.state.clear()
            self.reference_was_reset = True

    async def save(self, path: Path) -> None:
        """Writes `weights.safetensors` (float32 masters of a bfloat16 model) and `trainer.pt`.

        After a reset of the reference, also `reference.safetensors`.
        """
        async with self._turn:
            self._require_finite()
            counted = Counted(policy=self._policy, version=self._version, reports=self._reports)
            with boundary(CheckpointError, f"{self._where}: saving to {path}"):
                await self._run(write_trainer, path, counted, self._network, self._updater, self._cache)

    async def load(self, path: Path) -> Version:
        """Restores what `save` wrote, the gradient cache included."""
        async with self._turn:
            with boundary(CheckpointError, f"{self._where}: loading {path}"):
                await self._run(self._load, path)
            return self._version

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes the model, and the tokenizer if there is one, as a Hugging Face folder."""
        async with self._turn:
            self._require_finite()
            with boundary(CheckpointError, f"{self._where}: exporting to {path}"):
                await self._run(self._network.export, path, form)
                if self._tokenizer is not None and self._ranks.is_first:
                    self._tokenizer.save_pretrained(str(path))

    def _require_finite(self) -> None:
        if self._failure:
            raise TrainingError(self._failure)

    def _published(self) -> dict[str, Tensor]:
        tensors = self._network.published()
        self._ranks.first(lambda: self._check(tensors))
        return tensors

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if self._settings.lora is not None and (names := self._network.unbounded(tensors)):
            raise TrainingError(
                f"{self._where}: with the adapter these weights are not finite, or too large for a finite norm: "
                f"{some_of(names)}; nothing was published. The likely cause is training.optimizer.learning_rate, "
                f"{self._settings.optimizer.learning_rate:g}: use a lower one"
            )

    @property
    def _where(self) -> str:
        return f"policy '{self._policy}' at version {self._version}"

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.run(work, *args, **kwargs) if self._thread else work(*args, **kwargs)

    async def _open_sums(self, rows: Sequence[Weighted]) -> Mapping[str, OpenSums]:
        """Computes the two sums of each open credit group from its rows; no pass mixes two groups."""
        found: dict[str, OpenSums] = {}
        for name in dict.fromkeys(sample.open_group for sample, _ in rows):
            members = [row for row in rows if row[0].open_group == name]
            for together in await self._run(self._network.plan, [sample for sample, _ in members]):
                more = await self._run(self._backward.open_sums, members, together, self._version)
                if name in found:
                    found[name].add(more)
                else:
                    found[name] = more
            if self._ranks.world > 1:
                await self._run(found[name].total, self._ranks)
        return found

    def _close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        reports = [report for name, line in lines.items() if (report := self._cache.close(name, line))]
        self._reports |= {report.micro_batch_id: report for report in reports}
        if not self._cache.open and not any(report.num_tokens for report in self._reports.values()):
            self._reports = {}  # Else the next step's first rows, under these ids, would be taken for accumulated.
        return sum(report.num_tokens for report in reports)

    def _commit(self, work: Accumulating) -> LossReport:
        if work.gradients is not None:
            self._cache.add(work.gradients)
        self._cache.add_open(work.open_sums)
        of_ranks = self._ranks.everyone((self._objective.total(work.sums), time.perf_counter() - work.started))
        report = LossReport(
            micro_batch_id=work.batch.micro_batch_id,
            **work.batch.counts(),
            sums=self._objective.total(of_rank for of_rank, _ in of_ranks),
            duration_s=max(duration_s for _, duration_s in of_ranks),
        )
        self._reports[work.batch.micro_batch_id] = report
        return report

    def _step(self, divisors: Divisors) -> UpdateReport:
        self._require_finite()
        if self._cache.open:
            raise TrainingError(
                f"{self._where}: credit groups are open: {', '.join(self._cache.open)}; close them first"
            )
        total = self._objective.divisor(divisors, self._reports.values())
        if not self._reports or total <= 0:
            raise TrainingError(
                f"{self._where}: nothing to update from: {len(self._reports)} micro-batches, {divisors} and hence D = "
                f"{total}; leave the policy at its version for this step"
            )
        with returning_heap(self._network.model.device):
            # A batch whose advantages are all 0 has gradient 0, and is still an update (momentum, weight decay).
            gradients = self._cache.sums or self._updater.take_gradients()
            torch._foreach_div_(gradients, self._settings.accumulation_scale * total)
            try:
                norm, learning_rate = self._updater.apply(gradients, self._version, self._where)
            except TrainingError as error:
                self._failure = str(error) if self._updater.unbounded() else ""
                raise
            self._version = Version(self._version + 1)
            update = self._report(total, norm, learning_rate)
            self._cache.clear()
            self._reports = {}
            del gradients
        return update

    def _report(self, total: float, norm: float, learning_rate: float) -> UpdateReport:
        reports = self._reports.values()
        return UpdateReport(
            version=self._version,
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
            loss=sum(report.sums["loss"] for report in reports) / total,
            grad_norm=norm,
            learning_rate=learning_rate,
            means={**self._objective.means(reports), **tree_figures(reports)},
        )

    async def _per_sample(
        self, samples: Sequence[Sample], of_tokens: Callable[[Sequence[Sample], PrefixTree | None], Tensor]
    ) -> list[FloatArray]:
        """Returns [R] float32 for each sample; `of_tokens` computes the tokens of some samples, in order."""
        found, mine = [np.zeros(0, dtype=np.float32) for _ in samples], dict[int, FloatArray]()
        filled = [i for i, sample in enumerate(samples) if sample.num_tokens]
        for together in await self._run(self._network.plan, [samples[i] for i in filled]):
            places = [filled[row] for row in together.rows]
            flat = (await self._run(of_tokens, [samples[i] for i in places], together.tree)).float().cpu().numpy()
            ends = np.cumsum([samples[i].num_tokens for i in places])
            if not together.idle:
                mine |= dict(zip(places, np.split(flat, ends), strict=False))
        for of_rank in await self._run(self._ranks.everyone, mine):
            for i, of_sample in of_rank.items():
                found[i] = of_sample
        return found

    def _load(self, path: Path) -> None:
        counted = read_trainer(path, self._network, self._updater, self._cache)
        self._failure = ""
        self._version, self._reports = counted.version, counted.reports
        self.reference_was_reset, self._published_as = True, None
