"""Runs one policy's training life for one step: claim, accumulate, step.

consumes       READY rows of the policy, from the experience store
waits for      `notify_ready` and `close_step`, which the collect loop calls
produces       gradient sums in the trainer's cache; at `finish` a new version, and the rows TRAINED in it
unblocked by   a micro-batch's worth of READY rows, or the end of the step's collection
"""

import asyncio
from collections.abc import Callable
from functools import partial

from flexmarl.errors import TrainingError, boundary
from flexmarl.experience.interface import ExperienceStore, Outcome
from flexmarl.records import Divisors, LossReport, PolicyName, RowState, SampleId, Version
from flexmarl.training.interface import Trainer
from flexmarl.training.rows import AccumulateRows, accumulate_rows


def _ignore(report: LossReport) -> None:
    pass


class TrainingSession:
    """One policy's trainer in the pipeline. For every step: `accumulate` beside the collect loop, then `finish`.

    When the trainer fails, the claimed rows are READY again and the error goes up; what was accumulated before stays in
    the trainer's cache and in the store. `accumulate` is given where the trainer reads its rows itself.
    """

    def __init__(
        self,
        policy: PolicyName,
        store: ExperienceStore,
        trainer: Trainer,
        *,
        micro_batch: int,
        version: Version,
        accumulate: AccumulateRows | None = None,
        on_report: Callable[[LossReport], None] = _ignore,
    ) -> None:
        self._policy = policy
        self._store = store
        self._trainer = trainer
        self._micro_batch = micro_batch
        self._version = version
        self._accumulate_rows = accumulate or partial(accumulate_rows, store, trainer, policy)
        self._on_report = on_report
        self._wake = asyncio.Event()
        self._closed = False
        self._claims = 0
        self._accumulated: list[SampleId] = []
        self._num_tokens = 0.0

    @property
    def version(self) -> Version:
        """The version that the trainer holds."""
        return self._version

    @property
    def cache(self) -> str:
        """Name of the gradient cache that this step's rows go into."""
        return f"{self._policy}/{self._version}"

    def notify_ready(self) -> None:
        """Rows of the policy have become READY."""
        self._wake.set()

    def close_step(self) -> None:
        """No more rows will become READY in this step: what there is may be trained in a smaller micro-batch."""
        self._closed = True
        self._wake.set()

    async def accumulate(self) -> None:
        """Feeds READY rows to the trainer; returns when the step is closed and none is left."""
        while True:
            closed = self._closed
            ready = (await self._store.counts(self._policy)).get(RowState.READY, 0)
            if ready >= self._micro_batch or (closed and ready):
                await self._accumulate_one()
            elif closed:
                return
            else:
                await self._wake.wait()
                self._wake.clear()

    async def finish(self, divisors: Divisors) -> Version:
        """Updates the policy from what `accumulate` gathered, and opens the next step; returns the version from now on.

        A step without weighted tokens makes no update: its rows end TRAINED at the version there was.
        """
        if abs(self._num_tokens - divisors.num_tokens) > 1e-9 * divisors.num_tokens:
            raise TrainingError(
                f"policy '{self._policy}' at version {self._version}: {self._num_tokens:g} weighted tokens were "
                f"accumulated, but the step's divisors count {divisors.num_tokens:g}; count exactly the READY rows"
            )
        reason = "" if divisors.num_tokens else "no weighted token in the step"
        if divisors.num_tokens:
            with boundary(TrainingError, f"policy '{self._policy}' at version {self._version}: update"):
                self._version = await self._trainer.step(divisors)
        outcome = Outcome(state=RowState.TRAINED, version=self._version, reason=reason)
        await self._store.settle(self._accumulated, outcome)
        self._closed, self._claims, self._accumulated, self._num_tokens = False, 0, [], 0.0
        self._wake.clear()
        return self._version

    async def _accumulate_one(self) -> None:
        holder = f"trainer/{self._policy}"
        # An id is never used again, even if the call fails: other rows under it would be taken for accumulated.
        batch_id = f"{self.cache}/{self._claims}"
        self._claims += 1
        ids = await self._store.claim(self._policy, self._micro_batch, holder=holder)
        try:
            with boundary(TrainingError, f"accumulating micro-batch {batch_id}"):
                report = await self._accumulate_rows(batch_id, ids)
        except BaseException:
            await self._store.release(holder=holder)
            raise
        await self._store.settle(ids, Outcome(state=RowState.ACCUMULATED, cache=self.cache))
        self._accumulated += ids
        self._num_tokens += report.num_tokens
        self._on_report(report)
