"""A trainer of one number that remembers, and what every trainer must do."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexmarl.errors import CheckpointError, TrainingError
from flexmarl.experience.divisors import divisors_of
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectStore, checksum
from flexmarl.records import Divisors, MicroBatch, PolicyName, Version
from flexmarl.simulator.costs import TrainerCosts
from flexmarl.simulator.trainer import SimulatedTrainer
from flexmarl.training.interface import Trainer
from flexmarl.training.process_groups import ProcessGroup


def sample_costs(seconds: float) -> TrainerCosts:
    """Each sample takes so long, and all else nothing."""
    return TrainerCosts(sample_s=seconds, update_s=0.0, publish_s=0.0, resume_s=0.0, suspend_s=0.0)


class FakeTrainer(SimulatedTrainer):
    """A trainer that remembers what went into it. It takes no time but `sample_cost_s` for each sample.

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
    ) -> None:
        """`costs` are for tests in which updates and swaps take time too."""
        super().__init__(policy, costs or sample_costs(sample_cost_s), objects)
        self.accumulated: list[MicroBatch] = []
        """Every micro-batch that entered a cache, in order, over all steps."""
        self._fail_on = fail_on

    async def compute(self, batch: MicroBatch) -> float:
        """Takes the time of a micro-batch; raises if it is one of `fail_on`."""
        took_s = await super().compute(batch)
        if batch.micro_batch_id in self._fail_on:
            raise RuntimeError(f"scripted failure on {batch.micro_batch_id}")
        self.accumulated.append(batch)
        return took_s


async def check_trainer(
    make_trainer: Callable[[ObjectStore], Trainer],
    batches: Sequence[MicroBatch],
    folder: Path,
    *,
    streams: bool = True,
) -> None:
    """Asserts the contract of `Trainer`: at least two micro-batches of one policy, sampled at version 0.

    `make_trainer` must return equal trainers at version 0 every time; `folder` is an empty one for checkpoints.
    `streams` is False for settings that rows of open credit groups cannot be trained with (training/streaming.py).
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

    for sample, appraised in zip(batches[0].samples, await trainer.appraise(batches[0]), strict=True):
        for said in (appraised.values, appraised.reference):
            assert said is None or said.shape == (sample.num_tokens,), "one number for every sampled token, or None"

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
    if streams:
        await _check_dropped(make_trainer(InlineObjectStore()), batches[0], folder / "dropped")


async def _check_dropped(trainer: Trainer, batch: MicroBatch, folder: Path) -> None:
    """Rows of an open credit group that is dropped leave nothing behind, not even the id that they came under."""
    await trainer.accumulate(replace(batch, samples=tuple(replace(s, open_group="dropped") for s in batch.samples)))
    assert not await trainer.close_groups({"dropped": None}), "what is dropped must not be counted"
    await trainer.save(folder)
    await trainer.load(folder)
    report = await trainer.accumulate(batch)
    assert report.num_samples == len(batch.samples), "other rows must not be taken for those that were dropped"


async def check_process_group(
    make: Callable[[ObjectStore], tuple[Trainer, ProcessGroup]], batches: Sequence[MicroBatch]
) -> None:
    """Asserts the contract of `ProcessGroup`, law 9 in it: at least two micro-batches of one policy.

    `make` must return an equal trainer at version 0 every time, and its group, whose state is set aside.
    """
    divisors = divisors_of(sample for batch in batches for sample in batch.samples)

    async def updated(swaps_after: Collection[int]) -> Checksum:
        trainer, group = make(InlineObjectStore())
        assert group.policy == batches[0].policy, f"the group must be of policy '{batches[0].policy}'"
        await group.resume()
        for number, batch in enumerate(batches):
            await trainer.accumulate(batch)
            if number in swaps_after:
                await group.suspend()
                await _refuses(TrainingError, trainer.accumulate(batches[-1]), "training without devices")
                await _refuses(TrainingError, trainer.step(divisors), "an update without devices")
                await group.resume()
        assert await trainer.step(divisors) == 1, "the gradient sums must come back with the state"
        await group.suspend()
        await group.resume()
        return (await trainer.publish(Version(1)))[1]

    undisturbed = await updated(())
    assert await updated(range(len(batches))) == undisturbed, "suspend, then resume, must be bit-exact (law 9)"


async def _refuses(error: type[Exception], call: Awaitable[object], what: str) -> None:
    try:
        await call
    except error:
        return
    raise AssertionError(f"{what} must raise {error.__name__}")
