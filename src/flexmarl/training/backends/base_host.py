"""Host of a base on torch: the trainers of several adapters in one process, which compute micro-batches together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ParamSpec, TypeVar

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import TrainingError, boundary
from flexmarl.records import LossReport, MicroBatch, PolicyName
from flexmarl.training.backends.joint import JointPasses, Member
from flexmarl.training.backends.single import Accumulating, SingleProcessTrainer
from flexmarl.training.interface import RowReader
from flexmarl.training.together import RowsOf

P = ParamSpec("P")
T = TypeVar("T")


class BaseHost:
    """`SharedBase` of trainers whose models are bound to one base. A micro-batch alone goes the trainer's own way."""

    def __init__(
        self,
        trainers: Mapping[PolicyName, SingleProcessTrainer],
        passes: JointPasses,
        rows: RowReader,
        *,
        thread: DeviceThread | None = None,
    ) -> None:
        """`passes` are over the same base. `thread` is that of the trainers."""
        self._trainers, self._passes, self._rows, self._thread = trainers, passes, rows, thread

    async def accumulate(self, waiting: Sequence[RowsOf]) -> list[LossReport]:
        """Makes passes over the rows of all, and adds nothing to any cache before the last one has ended."""
        if len(waiting) == 1:
            (alone,) = waiting
            return [await self._trainers[alone.policy].accumulate(alone.micro_batch_id, alone.ids)]
        batches = [await self._read(rows) for rows in waiting]
        policies = sorted(batch.policy for batch in batches)
        async with AsyncExitStack() as turns:
            for policy in policies:  # In one order for all calls, so that no two wait for each other.
                await turns.enter_async_context(self._trainers[policy].turn)
            doing = f"policies {', '.join(policies)}: accumulating in one pass"
            with boundary(TrainingError, doing, users_code=True):
                found = [await self._trainers[batch.policy].begin(batch) for batch in batches]
                works = {work.batch.policy: work for work in found if isinstance(work, Accumulating)}
                await self._make_passes(works)
                return [
                    await self._trainers[work.batch.policy].commit(work) if isinstance(work, Accumulating) else work
                    for work in found
                ]

    async def _read(self, rows: RowsOf) -> MicroBatch:
        samples = await self._rows.read(rows.ids)
        return MicroBatch(micro_batch_id=rows.micro_batch_id, policy=rows.policy, samples=samples)

    async def _make_passes(self, works: Mapping[PolicyName, Accumulating]) -> None:
        trainers = {policy: self._trainers[policy] for policy in works}
        members = {policy: Member(trainer.backward, trainer.version) for policy, trainer in trainers.items()}
        trained = {policy: work.trained for policy, work in works.items()}
        sums: dict[PolicyName, list[Mapping[str, float]]] = {policy: [] for policy in works}
        for shares in await self._run(self._passes.plan, trained):
            of_shares = await self._run(self._passes.add, trained, shares, members)
            for share, of_share in zip(shares, of_shares, strict=True):
                sums[share.policy].append(of_share)
        for policy, work in works.items():
            await trainers[policy].end_passes(work, sums[policy])

    async def change(self, policy: PolicyName, method: str, *args: Any) -> Any:
        """Calls a method of a trainer."""
        return await getattr(self._trainers[policy], method)(*args)

    async def ask(self, policy: PolicyName, method: str, *args: Any) -> Any:
        """Calls a method of a trainer."""
        return await getattr(self._trainers[policy], method)(*args)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._thread.run(work, *args, **kwargs) if self._thread else work(*args, **kwargs)
