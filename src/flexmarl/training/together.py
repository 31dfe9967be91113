"""Runs micro-batches of several adapters on one base: those that wait at the same time, in one pass.

  sessions    one ── micro-batch ──┐ wait                 ┌──► report of one
              two ── micro-batch ──┴──► SharedBase ───────┴──► report of two
                                       one call at a time

consumes       micro-batches of the policies' sessions, at most one of each policy at a time
waits for      the call before; in rounds also for a micro-batch of every policy that is in a step
produces       a report for each micro-batch, and a `Joined` for each call of several; if it fails, its error for each
unblocked by   the end of a call; a policy that has no more rows in its step

`next_call` is the rule. In rounds the n-th micro-batches of a step go together whatever time they take to come, so that
a run repeats bit for bit. A call that fails has added nothing for any of its policies.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from flexmarl.cluster.concurrency import task_block
from flexmarl.cluster.proxy import alters
from flexmarl.errors import FlexmarlError, TrainingError, boundary
from flexmarl.events.event import Events
from flexmarl.events.training_events import Joined
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    CreditLine,
    Divisors,
    FloatArray,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Version,
    WorkerId,
)
from flexmarl.training.interface import Appraised, UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """A micro-batch that waits, by the ids of its rows."""

    policy: PolicyName
    micro_batch_id: str
    ids: tuple[SampleId, ...]


class SharedBase(Protocol):
    """Trainers of several policies, whose adapters are on one base in one process."""

    @alters
    async def accumulate(self, waiting: Sequence[RowsOf]) -> Sequence[LossReport]:
        """Accumulates micro-batches of different policies in passes that they share; returns a report for each.

        A call that raises has added nothing for any of them.
        """
        ...

    @alters
    async def change(self, policy: PolicyName, method: str, *args: Any) -> Any:
        """Calls a method of the policy's `Trainer` that changes its state."""
        ...

    async def ask(self, policy: PolicyName, method: str, *args: Any) -> Any:
        """Calls one that does not."""
        ...


def next_call(waiting: Collection[PolicyName], playing: Collection[PolicyName], *, in_rounds: bool) -> tuple[bool, str]:
    """Decides whether the micro-batches that wait are computed now, and says why.

    `waiting` are the policies of which one waits, `playing` those whose sessions are in a step.

    >>> next_call(["one"], ["one", "two"], in_rounds=True)
    (False, "'two' has none for this round yet")
    >>> next_call(["one"], ["one", "two"], in_rounds=False)
    (True, '1 of 2 policies waits')
    """
    if not waiting:
        return False, "nothing waits"
    if in_rounds and (missing := sorted(set(playing) - set(waiting))):
        return False, f"'{missing[0]}' has none for this round yet"
    return True, f"{len(waiting)} of {len(playing)} policies {'waits' if len(waiting) == 1 else 'wait'}"


@dataclass(slots=True)
class _Asked:
    rows: RowsOf
    answer: asyncio.Future[LossReport]


class Together:
    """The policies whose adapters are on one base. It computes inside `async with together.open():`."""

    def __init__(
        self, base: SharedBase, policies: Sequence[PolicyName], *, in_rounds: bool, events: Events | None = None
    ) -> None:
        """`in_rounds`: which micro-batches go together must not depend on time (`deterministic`).

        Calls for several policies are emitted to `events`.
        """
        self._base, self._in_rounds, self._events = base, in_rounds, events or Events()
        self.trainers = {policy: MemberTrainer(policy, base, self) for policy in policies}
        """The trainer of each policy."""
        self._waiting: dict[PolicyName, list[_Asked]] = {policy: [] for policy in policies}
        self._playing = set[PolicyName]()
        self._under_way: asyncio.Task[None] | None = None
        self._abandoned: dict[PolicyName, str] = {}
        """Micro-batches whose wait was cancelled while they were computed, of policies that were not loaded since."""
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Computes inside the block. Leaving it ends the wait for a call under way, not its work."""
        async with task_block() as self._tasks:
            try:
                yield self
            finally:
                if self._under_way is not None:
                    self._under_way.cancel()

    @contextmanager
    def playing(self, policy: PolicyName) -> Iterator[None]:
        """The part of a step in which a policy's session may have more micro-batches."""
        self._playing.add(policy)
        try:
            yield
        finally:
            self._playing.discard(policy)
            self._settle()

    async def accumulate(self, rows: RowsOf) -> LossReport:
        """Accumulates a micro-batch, alone or with others. One whose wait is cancelled before its call is not sent."""
        self.check(rows.policy)
        asked = _Asked(rows, asyncio.get_running_loop().create_future())
        queue = self._waiting[rows.policy]
        queue.append(asked)
        self._settle()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked in queue:
                queue.remove(asked)
                self._settle()
            else:
                self._abandoned[rows.policy] = rows.micro_batch_id
            raise

    def check(self, policy: PolicyName) -> None:
        """Raises TrainingError if nobody knows what the policy's gradients hold."""
        if micro_batch := self._abandoned.get(policy):
            raise TrainingError(
                f"policy '{policy}': 'accumulate' of {micro_batch} was cancelled while it ran, so its state is "
                f"unknown; load a checkpoint"
            )

    def loaded(self, policy: PolicyName) -> None:
        """Called when the policy's whole state was replaced."""
        self._abandoned.pop(policy, None)

    def _settle(self) -> None:
        waiting = [policy for policy, asked in self._waiting.items() if asked]
        now, because = next_call(waiting, self._playing, in_rounds=self._in_rounds)
        if self._under_way or not now:
            return
        assert self._tasks is not None, "policies with training.together need `async with together.open():` around them"
        chosen = [self._waiting[policy].pop(0) for policy in waiting]
        self._under_way = self._tasks.create_task(
            self._call(chosen, because), name=f"together-{chosen[0].rows.micro_batch_id}"
        )

    async def _call(self, chosen: Sequence[_Asked], because: str) -> None:
        names, began = tuple(each.rows.micro_batch_id for each in chosen), self._events.now()
        try:
            with boundary(TrainingError, f"accumulating {', '.join(names)}"):
                reports = await self._base.accumulate([each.rows for each in chosen])
        except FlexmarlError as error:
            for each in chosen:
                if not each.answer.done():  # Its caller may have been cancelled.
                    each.answer.set_exception(error)
        else:
            for each, report in zip(chosen, reports, strict=True):
                if not each.answer.done():
                    each.answer.set_result(report)
            if len(chosen) > 1:
                process = WorkerId.trainer(next(iter(self.trainers)))
                self._events.emit(Joined(process=process, began=began, micro_batches=names, because=because))
        finally:
            for each in chosen:
                each.answer.cancel()  # Those that have no answer: this call was cancelled.
        self._under_way = None
        self._settle()


class MemberTrainer:
    """`Trainer` of one policy on a shared base."""

    def __init__(self, policy: PolicyName, base: SharedBase, together: Together) -> None:
        self._policy, self._base, self._together = policy, base, together

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Accumulates them, in passes with rows of other policies if such wait too."""
        rows = RowsOf(policy=self._policy, micro_batch_id=micro_batch_id, ids=tuple(ids))
        return await self._together.accumulate(rows)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """As the policy's trainer; so do the following."""
        return await self._change("close_groups", lines)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates."""
        return await self._change("step", divisors)

    async def publish(self, version: Version) -> Checksum:
        """Sets the weights."""
        return await self._base.ask(self._policy, "publish", version)

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Computes log-probabilities."""
        return await self._base.ask(self._policy, "logprobs", batch)

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Appraises rows."""
        return await self._base.ask(self._policy, "appraise", ids)

    async def reset_reference(self) -> None:
        """Resets the reference."""
        await self._change("reset_reference")

    async def save(self, path: Path) -> None:
        """Saves the trainer."""
        await self._base.ask(self._policy, "save", path)

    async def load(self, path: Path) -> Version:
        """Loads the trainer."""
        version = await self._base.change(self._policy, "load", path)
        self._together.loaded(self._policy)
        return version

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Exports the model."""
        await self._base.ask(self._policy, "export", path, form)

    async def _change(self, method: str, *args: Any) -> Any:
        self._together.check(self._policy)
        return await self._base.change(self._policy, method, *args)
