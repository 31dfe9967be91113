"""A fake trainer that records its input, and conformance checks of trainers and process groups.

`agreement` measures how much an engine and a trainer of one model differ in the log-probabilities of sampled tokens.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flexmarl.analysis.costs import TrainerCosts
from flexmarl.cluster.allocation import Lease
from flexmarl.errors import CheckpointError, StoreError, TrainingError
from flexmarl.inference.interface import InferenceEngine, answers_of
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectStore, checksum, weights_key
from flexmarl.records import (
    AgentName,
    Divisors,
    EpisodeId,
    Generation,
    GenerationRequest,
    LossReport,
    MicroBatch,
    PolicyName,
    Sample,
    SampleId,
    Turn,
    Version,
)
from flexmarl.simulator.modelled_cache import ModelledCache
from flexmarl.simulator.modelled_trainer import ModelledTrainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.batching import Rows, rows_of
from flexmarl.training.interface import HeldRows, RowReader, Trainer
from flexmarl.training.losses import PolicyLoss
from flexmarl.training.residency import ProcessGroup


@dataclass(frozen=True, slots=True)
class Agreement:
    """Absolute differences of the engine's and the trainer's log-probabilities, in nats, over all sampled tokens."""

    num_tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float


async def agreement(engine: InferenceEngine, trainer: Trainer, requests: Sequence[GenerationRequest]) -> Agreement:
    """Plays the requests on the engine, then compares its raw log-probabilities with the trainer's.

    Both must hold the same weights. At temperature 1 and without filters, both describe one distribution.
    """
    by_id = {request.request_id: request for request in requests}
    played = [generation async for generation in answers_of(engine, requests)]
    samples = [sample_of(by_id[generation.request_id], generation) for generation in played]
    batch = MicroBatch(micro_batch_id="agreement", policy=requests[0].policy, samples=tuple(samples))
    theirs = np.concatenate(await trainer.logprobs(batch))
    apart = np.abs(np.concatenate([generation.raw_logprobs for generation in played]) - theirs)
    return Agreement(num_tokens=len(apart), mean=float(apart.mean()), largest=float(apart.max()))


def sample_of(request: GenerationRequest, generation: Generation, *, advantage: float = 1.0) -> Sample:
    """Makes a call into the only sample of an episode. Raises AssertionError if the request was not served."""
    assert not generation.error, f"request '{request.request_id}' was not served: {generation.error}"
    name = request.request_id
    turn = Turn(
        sample_id=SampleId(name),
        episode=EpisodeId(name),
        agent=AgentName(request.policy),
        policy=request.policy,
        prompt_ids=request.prompt_ids,
        response_ids=generation.response_ids,
        logprobs=generation.logprobs,
        raw_logprobs=generation.raw_logprobs,
        versions=generation.versions,
        finish=generation.finish,
    )
    return Sample(turn=turn, advantage=advantage, weight=1.0, episode_tokens=len(generation.response_ids))


NOBODY = SampleId("nobody_0_g0e0a0")


def sample_costs(seconds: float) -> TrainerCosts:
    """Returns costs by which each sample takes `seconds`, and nothing else takes time."""
    return TrainerCosts(sample_s=seconds, update_s=0.0, publish_s=0.0, resume_s=0.0, suspend_s=0.0)


class FakeTrainer(ModelledTrainer):
    """A trainer that records its micro-batches. Each sample takes `sample_cost_s`, and nothing else takes time.

    `fail_on` names the micro-batches that raise, after their time.
    """

    def __init__(
        self,
        policy: PolicyName,
        objects: ObjectStore,
        *,
        sample_cost_s: float = 0.0,
        fail_on: frozenset[str] = frozenset(),
        costs: TrainerCosts | None = None,
        rows: RowReader | None = None,
        cache: ModelledCache | None = None,
    ) -> None:
        """`costs` replaces `sample_cost_s` in tests in which updates and swaps take time too."""
        super().__init__(policy, costs or sample_costs(sample_cost_s), objects, rows=rows, cache=cache)
        self.accumulated: list[MicroBatch] = []
        """Every micro-batch that entered a cache, in order, over all steps."""
        self._fail_on = fail_on

    async def compute(self, batch: MicroBatch) -> float:
        """Waits for as long as the micro-batch takes. Raises RuntimeError if it is one of `fail_on`."""
        took_s = await super().compute(batch)
        if batch.micro_batch_id in self._fail_on:
            raise RuntimeError(f"scripted failure on {batch.micro_batch_id}")
        self.accumulated.append(batch)
        return took_s


MakeTrainer = Callable[[ObjectStore, RowReader], Trainer | Awaitable[Trainer]]
"""Makes a trainer that publishes to the object store and reads its rows from the reader."""


async def check_trainer(
    make_trainer: MakeTrainer, batches: Sequence[MicroBatch], folder: Path, *, streams: bool = True
) -> None:
    """Asserts the contract of `Trainer` with `batches`: two or more micro-batches of one policy, sampled at version 0.

    `make_trainer` must return equal trainers at version 0 every time. They read their rows from the given reader.
    `folder` is an empty folder for checkpoints. `streams` is False for settings that cannot train rows of open credit
    groups (`PolicyLoss.linear_in_advantage`).
    """
    divisors = divisors_of(sample for batch in batches for sample in batch.samples)
    samples = [sample for batch in batches for sample in batch.samples]
    assert len({sample.turn.sample_id for sample in samples}) == len(samples), "every sample needs an id of its own"
    rows = HeldRows(samples)
    trainer = await _made(make_trainer(InlineObjectStore(), rows))

    await _refuses(TrainingError, trainer.step(divisors), "a step without any micro-batch")
    await _refuses(StoreError, trainer.accumulate("unknown", [NOBODY]), "rows that the store does not have")
    await _refuses(StoreError, trainer.appraise([NOBODY]), "an appraisal of rows that the store does not have")
    for batch in batches:
        report = await accumulate(trainer, batch)
        assert report.micro_batch_id == batch.micro_batch_id
        assert report.num_samples == len(batch.samples)
        assert np.isclose(report.num_tokens, sum(s.weight * s.num_tokens for s in batch.samples), rtol=1e-12)
        assert await accumulate(trainer, batch) == report, "accumulating an id again must return its first report"
    await _refuses(TrainingError, trainer.step(Divisors()), "a step with divisors of zero")

    await _check_figures(trainer, batches[0])
    await trainer.save(folder / "with_cache")
    assert (await trainer.step(divisors)).version == 1, "the first update makes version 1"
    await _refuses(TrainingError, trainer.step(divisors), "a second step from sums that the first has used")
    await _refuses(TrainingError, trainer.publish(Version(0)), "publishing a version that is gone")
    updated = await trainer.publish(Version(1))

    once = await _made(make_trainer(InlineObjectStore(), rows))
    await asyncio.gather(*(accumulate(once, batch) for batch in batches))
    await once.step(divisors)
    assert await once.publish(Version(1)) == updated, "accumulating an id again must change nothing"

    objects = InlineObjectStore()
    restored = await _made(make_trainer(objects, rows))
    assert await restored.load(folder / "with_cache") == 0
    await accumulate(restored, batches[0])
    await restored.step(divisors)
    published = await restored.publish(Version(1))
    assert published == updated, "a restored trainer must go on bit for bit, gradient cache and its ids included"
    stored = await objects.get(weights_key(batches[0].policy, Version(1)))
    assert checksum(stored) == published, "the checksum must be that of the object"

    await _refuses(CheckpointError, restored.load(folder / "nowhere"), "loading a folder that is not there")
    await trainer.export(folder / "export")
    assert any((folder / "export").iterdir()), "an export is a folder with files"
    if streams:
        await _check_dropped(make_trainer, batches[0], folder / "dropped")


async def _check_figures(trainer: Trainer, batch: MicroBatch) -> None:
    for sample, values in zip(batch.samples, await trainer.logprobs(batch), strict=True):
        assert values.dtype == np.float32
        assert values.shape == (sample.num_tokens,), "one log-probability for every sampled token"
    appraised = await trainer.appraise([sample.turn.sample_id for sample in batch.samples])
    for sample, appraisal in zip(batch.samples, appraised, strict=True):
        for figures in (appraisal.values, appraisal.reference, appraisal.divergence):
            assert figures is None or figures.shape == (sample.num_tokens,), "a number for every sampled token, or None"


async def accumulate(trainer: Trainer, batch: MicroBatch) -> LossReport:
    """Has a trainer accumulate a micro-batch, and returns its report. The trainer's reader must hold the rows."""
    return await trainer.accumulate(batch.micro_batch_id, [sample.turn.sample_id for sample in batch.samples])


async def _made(trainer: Trainer | Awaitable[Trainer]) -> Trainer:
    return await trainer if inspect.isawaitable(trainer) else trainer


async def _check_dropped(make_trainer: MakeTrainer, batch: MicroBatch, folder: Path) -> None:
    """Checks that a dropped credit group leaves nothing behind, not even the id of its rows' micro-batch."""
    rows = HeldRows([replace(sample, open_group="dropped") for sample in batch.samples])
    trainer = await _made(make_trainer(InlineObjectStore(), rows))
    await accumulate(trainer, batch)
    assert not await trainer.close_groups({"dropped": None}), "what is dropped must not be counted"
    await trainer.save(folder)
    await trainer.load(folder)
    rows.hold(batch.samples)
    report = await accumulate(trainer, batch)
    assert report.num_samples == len(batch.samples), "other rows must not be taken for those that were dropped"


def check_loss(loss: PolicyLoss, *, num_batches: int = 20) -> None:
    """Raises AssertionError naming the law that the loss breaks on random tokens, ratios up to exp(40) included."""
    for seed in range(num_batches):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (4,), generator=draw).tolist()
        rows = rows_of(lengths)
        now, old = (-20 * torch.rand(len(rows.of_token), generator=draw, dtype=torch.float64) ** 2 for _ in range(2))
        advantages = rows.spread(torch.randn(4, generator=draw, dtype=torch.float64))
        values, gradient = _loss_of(loss, now, old, advantages, rows)
        assert values.isfinite().all(), "losses are finite"
        assert gradient.isfinite().all(), "gradients are finite"
        for row in range(4):
            mine = rows.of_token == row
            found = _loss_of(loss, now[mine], old[mine], advantages[mine], rows_of(lengths[row : row + 1]))
            assert torch.allclose(torch.stack(found), torch.stack((values[mine], gradient[mine])), rtol=1e-9), (
                "a row's losses and gradients do not depend on other rows"
            )
        if loss.zero_advantage_is_zero_gradient:
            _, nothing = _loss_of(loss, now, old, torch.zeros_like(advantages), rows)
            assert not nothing.any(), "it says that a row with advantage 0 has no gradient; see the class variable"
        if loss.linear_in_advantage:
            one = torch.stack(_loss_of(loss, now, now, torch.ones_like(advantages), rows))
            found = torch.stack(_loss_of(loss, now, now, advantages, rows))
            assert torch.allclose(found, one * advantages, rtol=1e-9), (
                "it says that loss and gradient are linear in the advantage where nothing has changed"
            )


def _loss_of(loss: PolicyLoss, now: Tensor, old: Tensor, advantages: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the gradient of their sum."""
    logprobs = now.clone().requires_grad_()
    values, acted = loss.per_token(logprobs, old, advantages, rows)
    assert values.shape == now.shape, f"there is a loss for each of {len(now)} tokens, not {tuple(values.shape)}"
    assert (acted.shape, acted.dtype) == (now.shape, torch.bool), "where a bound acted is a bool for each token"
    (gradient,) = torch.autograd.grad(values.sum(), logprobs, materialize_grads=True)
    return values.detach(), gradient


async def check_process_group(
    make: Callable[[ObjectStore, RowReader], tuple[Trainer, ProcessGroup]], batches: Sequence[MicroBatch]
) -> None:
    """Asserts the contract of `ProcessGroup`, including law 9, with two or more micro-batches of one policy.

    `make` must return an equal trainer at version 0 every time, and its group. The trainer's state is set aside.
    """
    divisors = divisors_of(sample for batch in batches for sample in batch.samples)

    async def updated(swaps_after: Collection[int]) -> Checksum:
        trainer, group = make(InlineObjectStore(), HeldRows([s for batch in batches for s in batch.samples]))
        assert group.policy == batches[0].policy, f"the group must be of policy '{batches[0].policy}'"
        here, there = (Lease(place=place, holder=group.policy, because="the check") for place in range(2))
        await group.resume(here)
        for number, batch in enumerate(batches):
            await accumulate(trainer, batch)
            if number in swaps_after:
                await group.suspend()
                await _refuses(TrainingError, accumulate(trainer, batches[-1]), "training without devices")
                await _refuses(TrainingError, trainer.step(divisors), "an update without devices")
                await group.resume(there if number % 2 else here)
        assert (await trainer.step(divisors)).version == 1, "the gradient sums must come back with the state"
        await group.suspend()
        await group.resume(there)
        return await trainer.publish(Version(1))

    undisturbed = await updated(())
    assert await updated(range(len(batches))) == undisturbed, "suspend, then resume, must be bit-exact (law 9)"


async def _refuses(error: type[Exception], call: Awaitable[object], what: str) -> None:
    try:
        await call
    except error:
        return
    raise AssertionError(f"{what} must raise {error.__name__}")
