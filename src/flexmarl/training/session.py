"""Runs one policy's training for one step: claim rows, accumulate their gradients, update.

  controller   claim a ─ send ─ claim b ─ send ─────── settle a ─ claim c ─ send ─── settle b ...
  trainer                  ▐██ a ████████████████████▌▐██ b █████████████████████████▌▐██ c ...

consumes       READY rows of the policy, from the experience store
waits for      `RowsReady` of its policy; `close_step`, at the end of a collection; devices, where policies share them
produces       gradient sums in the trainer's cache; at `finish` a new version, and the rows TRAINED in it; lines, which
               close the sums of open credit groups
unblocked by   a micro-batch's worth of READY rows, or the end of the step's collection; a policy that leaves devices
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from flexmarl.errors import TrainingError, boundary
from flexmarl.events.event import Events
from flexmarl.events.notices import RowsReady
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.experience.interface import ExperienceStore, Outcome
from flexmarl.records import CreditLine, Divisors, PolicyName, RowState, SampleId, Version, WorkerId
from flexmarl.training.interface import Trainer, UpdateReport
from flexmarl.training.residency import Residency
from flexmarl.training.settings import ProcessGroupSettings
from flexmarl.training.together import Together


@dataclass(frozen=True, slots=True)
class _Drop:
    """Reason why a claimed row ends FILTERED."""

    group: str
    """Name of the credit group that was dropped."""
    because: str


class TrainingSession:
    """One policy's trainer in the pipeline. A step calls `accumulate`, `close_step`, `finish`, then `leave`.

    The session holds devices while micro-batches are due. Once the step is closed, it keeps them until it leaves. So
    sessions that share devices must not wait for one another between `close_step` and `leave`.

    If the trainer fails, the rows that it has not accumulated become READY again, and the error is raised. Rows that it
    accumulated before stay in its cache and in the store.

    With `together`, the trainer is one of several on one base, and micro-batches of theirs go into the same passes.

    With `ahead`, the trainer is sent the next micro-batch while it works on one. A trainer in another process then does
    not wait for two commits of the store and two crossings between micro-batches.
    """

    def __init__(
        self,
        policy: PolicyName,
        store: ExperienceStore,
        trainer: Trainer,
        *,
        micro_batch: int,
        version: Version,
        ahead: bool = False,
        events: Events,
        residency: Residency | None = None,
        together: Together | None = None,
    ) -> None:
        """`residency` shares devices between policies; without it, the policy has its own.

        `events` must be those of the part that makes rows READY. Every accumulated micro-batch is emitted to them.
        """
        self._policy, self._store, self._trainer = policy, store, trainer
        self._micro_batch, self._version = micro_batch, version
        self._at_once = 2 if ahead else 1
        self._events = events
        self._events.listen(RowsReady, self._rows_ready)
        self._together = together
        self._wake = asyncio.Event()
        self._residency = residency or Residency({}, ProcessGroupSettings())
        self._residency.join(policy, self._wake.set)
        self._under_way: list[asyncio.Task[None]] = []
        """Micro-batches that were sent to the trainer and have not ended, the oldest first."""
        self._closed = False
        self._claims = 0
        self._claiming = asyncio.Lock()
        """Held while rows are claimed, given back, or lose their group."""
        self._claimed = set[SampleId]()
        """Rows that were claimed in this step."""
        self._accumulated: list[SampleId] = []
        self._dropped: dict[SampleId, _Drop] = {}
        """Rows of groups that were dropped after the rows had been claimed."""
        self._lines: dict[str, CreditLine | None] = {}
        """Lines of credit groups that were closed, by name, until they are sent to the trainer."""
        self._num_tokens = 0.0

    @property
    def version(self) -> Version:
        """The version that the trainer holds."""
        return self._version

    @property
    def cache(self) -> str:
        """Name of the gradient cache for this step's rows."""
        return f"{self._policy}/{self._version}"

    async def close_group(self, name: str, ids: Sequence[SampleId], line: CreditLine | None, because: str = "") -> None:
        """Closes the credit group `name`, whose rows `ids` became READY before it was complete.

        `line` turns the scores of rows that were already accumulated into advantages. Rows that the trainer reads from
        now on already carry theirs. Without a line, the group was dropped for the reason `because`, and its rows end
        FILTERED; rows that the trainer is working on end so after their micro-batch.
        """
        async with self._claiming:
            claimed = [sample_id for sample_id in ids if sample_id in self._claimed]
            if line is None:
                self._dropped |= dict.fromkeys(claimed, _Drop(group=name, because=because))
                left = [i for i in ids if i not in self._claimed or i in self._accumulated]
                self._accumulated = [i for i in self._accumulated if i not in self._dropped]
                await self._store.settle(left, Outcome(state=RowState.FILTERED, reason=because))
        if claimed:
            self._lines[name] = line

    def close_step(self) -> None:
        """Ends the collection: no more rows become READY in this step, so the last micro-batch may be smaller."""
        self._closed = True
        self._residency.close(self._policy)
        self._wake.set()

    async def accumulate(self) -> None:
        """Feeds READY rows to the trainer. Returns when the step is closed and no row is left.

        If a micro-batch fails, the error is raised once the others under way have ended. Their rows are then
        accumulated, or READY again.
        """
        with self._together.playing(self._policy) if self._together else nullcontext():
            try:
                while not await self._advance():
                    await self._wake.wait()
                    self._wake.clear()
            except asyncio.CancelledError:
                for task in self._under_way:
                    task.cancel()
                raise
            finally:
                await asyncio.gather(*self._under_way, return_exceptions=True)
                self._under_way = []

    async def finish(self, divisors: Divisors) -> UpdateReport | None:
        """Updates the policy from the accumulated rows and opens the next step. Returns the report of the update.

        A step without weighted tokens makes no update and returns None; its rows end TRAINED at the present version.
        Raises TrainingError if the trainer fails, or if `divisors` do not count the accumulated tokens.
        """
        update = None
        if self._lines:
            await self.hold()
            await self._tell_lines()
        if abs(self._num_tokens - divisors.num_tokens) > 1e-9 * divisors.num_tokens:
            raise TrainingError(
                f"policy '{self._policy}' at version {self._version}: {self._num_tokens:g} weighted tokens were "
                f"accumulated, but the step's divisors count {divisors.num_tokens:g}; count exactly the READY rows"
            )
        reason = "" if divisors.num_tokens else "no weighted token in the step"
        if divisors.num_tokens:
            await self.hold()
            with boundary(TrainingError, f"policy '{self._policy}' at version {self._version}: update"):
                update = await self._trainer.step(divisors)
            self._version = update.version
            if not self._under_way:
                self._residency.updated(self._policy)
        outcome = Outcome(state=RowState.TRAINED, version=self._version, reason=reason)
        await self._store.settle(self._accumulated, outcome)
        self._closed, self._claims, self._accumulated, self._num_tokens = False, 0, [], 0.0
        self._claimed, self._dropped = set(), {}
        self._wake.clear()
        return update

    async def hold(self) -> None:
        """Waits for the policy's devices, which it then has until `leave`."""
        while not self._residency.hold(self._policy, 0, keep=True):
            await self._wake.wait()
            self._wake.clear()

    def leave(self) -> None:
        """Frees the devices after the new version is published, unless rows of the next step are already on them."""
        if not self._under_way:
            self._residency.leave(self._policy)

    def _rows_ready(self, rows: RowsReady) -> None:
        if self._policy in rows.policies:
            self._wake.set()

    async def _advance(self) -> bool:
        """Sends all micro-batches that can be sent now. Returns True if all rows of the step are accumulated."""
        under_way = self._under_way
        while True:
            while under_way and under_way[0].done():
                under_way.pop(0).result()
            closed = self._closed
            if len(under_way) == self._at_once:
                return False
            ready = (await self._store.counts(self._policy)).get(RowState.READY, 0)
            if ready < (1 if closed else self._micro_batch):
                return self._rests(ready, closed)
            if not self._residency.hold(self._policy, ready, keep=closed, busy=bool(under_way)):
                return False
            if task := await self._send():
                under_way.append(task)

    def _rests(self, ready: int, closed: bool) -> bool:
        """Called when no micro-batch is due. Returns True if the step has ended."""
        if not closed and not self._under_way:
            self._residency.expect(self._policy, ready, self._micro_batch)
        return closed and not self._under_way

    async def _send(self) -> asyncio.Task[None] | None:
        """Claims rows and starts to accumulate them; the loop is woken at the end. None if no row was left to claim."""
        batch_id = f"{self.cache}/{self._claims}"
        async with self._claiming:
            ids = await self._store.claim(self._policy, self._micro_batch, holder=_holder(batch_id))
            self._claimed.update(ids)
        if not ids:  # Their group was dropped after they were counted.
            return None
        # An id is never used again, even if the call fails: other rows under it would count as accumulated already.
        self._claims += 1
        task = asyncio.create_task(self._accumulate_one(batch_id, ids), name=f"accumulate-{batch_id}")
        task.add_done_callback(lambda _: self._wake.set())
        return task

    async def _accumulate_one(self, batch_id: str, ids: Sequence[SampleId]) -> None:
        try:
            await self._tell_lines()
            with boundary(TrainingError, f"accumulating micro-batch {batch_id}"):
                report = await self._trainer.accumulate(batch_id, ids)
        except BaseException:
            await self._give_back(batch_id, ids)
            raise
        ended = asyncio.get_running_loop().time()
        await self._store.settle(ids, Outcome(state=RowState.ACCUMULATED, cache=self.cache))
        # Decided at this moment: `close_group` itself ends rows that are dropped later, for they are accumulated.
        dropped = {sample_id: self._dropped[sample_id] for sample_id in ids if sample_id in self._dropped}
        # The trainer may have closed the group before it got these rows, which opened it again: close it once more.
        self._lines |= {drop.group: None for drop in dropped.values()}
        self._accumulated += [sample_id for sample_id in ids if sample_id not in dropped]
        self._num_tokens += report.num_tokens
        for sample_id, drop in dropped.items():
            await self._store.settle([sample_id], Outcome(state=RowState.FILTERED, reason=drop.because))
        self._residency.trained(self._policy, report.num_samples + report.open_samples, report.duration_s)
        ended = self._events.moment(ended)
        self._events.emit(
            MicroBatchDone(
                process=WorkerId.trainer(self._policy),
                began=ended - report.duration_s,
                ended=ended,
                policy=self._policy,
                micro_batch=report.micro_batch_id,
                rows=report.num_samples + report.open_samples,
                tokens=report.num_tokens + report.open_tokens,
                duration_s=report.duration_s,
            )
        )

    async def _give_back(self, batch_id: str, ids: Sequence[SampleId]) -> None:
        """Makes rows that were not accumulated READY again. If their group was dropped, they end FILTERED instead."""
        async with self._claiming:
            await self._store.release(holder=_holder(batch_id))
            self._claimed.difference_update(ids)
            for sample_id in ids:
                if drop := self._dropped.pop(sample_id, None):
                    await self._store.settle([sample_id], Outcome(state=RowState.FILTERED, reason=drop.because))

    async def _tell_lines(self) -> None:
        """Sends the lines of closed groups. The trainer applies them after the micro-batches sent before."""
        lines, self._lines = self._lines, {}
        if lines:
            with boundary(TrainingError, f"policy '{self._policy}' at version {self._version}: closing credit groups"):
                num_tokens = await self._trainer.close_groups(lines)
            # Not `+= await`: that reads the count before the wait, and a micro-batch may end during it.
            self._num_tokens += num_tokens


def _holder(batch_id: str) -> str:
    """Name that holds the rows of one micro-batch, so that giving one back does not release the next one's rows."""
    return f"trainer/{batch_id}"
