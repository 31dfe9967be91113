"""Reads claimed rows where the trainer is, so that samples do not pass through the controller on their way to it."""

from collections.abc import Awaitable, Callable, Sequence

from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.rows import sample_from_row
from flexmarl.records import LossReport, MicroBatch, PolicyName, SampleId
from flexmarl.training.interface import Trainer

AccumulateRows = Callable[[str, Sequence[SampleId]], Awaitable[LossReport]]
"""Accumulates the rows of these ids as the micro-batch of that id; errors are those of the store and of the trainer.

A call may come before the last one has ended: the trainer takes them in their order.
"""


async def read_micro_batch(
    store: ExperienceStore, policy: PolicyName, micro_batch_id: str, ids: Sequence[SampleId]
) -> MicroBatch:
    """The rows as training sees them."""
    samples = tuple(sample_from_row(row) for row in await store.get(ids))
    return MicroBatch(micro_batch_id=micro_batch_id, policy=policy, samples=samples)


async def accumulate_rows(
    store: ExperienceStore, trainer: Trainer, policy: PolicyName, micro_batch_id: str, ids: Sequence[SampleId]
) -> LossReport:
    """Reads the rows as samples and gives them to the trainer."""
    return await trainer.accumulate(await read_micro_batch(store, policy, micro_batch_id, ids))
