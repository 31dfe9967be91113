"""Runs training in which every policy updates on its own, as its own batch fills (`pipeline.updates: per_policy`).

                     ┌► solver's batch   ████████ update, serve   ████████ update ...
  stream ──► credit ─┤
                     └► verifier's batch ██ (timeout) update, serve   ████ ...      a group's slot is free when
                                                                                    all its policies have updated on it

consumes    kept groups, in the order of the window
waits for   per policy: as many groups with samples of it as make a step, or the timeout of the oldest of them
produces    updates, served, of each policy at its own pace; a step is done when as many groups as make one are trained
unblocked by the stream, the timeout, or a step that is to end at rest: then every batch ends early
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from flexmarl.events.group_events import BatchFilled, GroupReady
from flexmarl.experience.divisors import divisors_of
from flexmarl.orchestrator.asynchronous import Stream
from flexmarl.orchestrator.parts import Parts
from flexmarl.records import CreditedTurn, Divisors, GroupId, GroupRecord, GroupState, PolicyName
from flexmarl.tasks import SourceExhausted


@dataclass(frozen=True, slots=True)
class _Share:
    """What one group is to one policy."""

    group: GroupId
    samples: Sequence[CreditedTurn]
    came: float


@dataclass(slots=True)
class _Queue:
    """Shares of one policy that are in no batch yet."""

    shares: deque[_Share] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class PerPolicy:
    """Every policy's own batches, and the groups that some of their policies have not updated on."""

    def __init__(self, parts: Parts, stream: Stream, *, timeout_s: float) -> None:
        self._parts = parts
        self._stream = stream
        self._timeout_s = timeout_s
        self._queues = {policy: _Queue() for policy in parts.sessions}
        self._owing: dict[GroupId, set[PolicyName]] = {}
        """Policies that have yet to update on each group; while it is credited, all of them."""
        self._trained: list[GroupId] = []
        """Groups of this step that all their policies have updated on."""
        self._progress = asyncio.Event()
        self._awake = asyncio.Event()
        self._held: GroupRecord | None = None
        """Taken, and not to be handed out before the next step begins."""
        self._over = False
        """No group will come any more."""
        self._step = 0

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Rollout and every policy's training go on in this block."""
        async with self._stream.playing(), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._hand_out(), name="hand-out")]
            working += [tasks.create_task(self._train(policy), name=f"train/{policy}") for policy in self._queues]
            yield
            for task in working:
                task.cancel()
            if self._held:
                self._stream.give_back(self._held)

    async def step(self, step: int, *, rest: bool) -> Sequence[GroupId]:
        """Waits until as many groups as make a step are trained, or more; with `rest`, until all that were handed out
        are, in batches that end early.
        """
        self._step, self._trained = step, []
        self._awake.set()
        while len(self._trained) < self._parts.admission.law.groups:
            if self._over and not self._owing:
                raise SourceExhausted(f"step {step} cannot be filled: {self._parts.feed.exhausted}")
            await self._wait()
        if rest:
            self._awake.clear()
            self._look_again()
            while self._owing:
                await self._wait()
        return self._trained

    async def _wait(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _hand_out(self) -> None:
        """Gives every group that is taken to its policies."""
        try:
            while True:
                self._held = group = await self._stream.next(self._step)
                await self._awake.wait()
                self._held = None
                await self._credit(group)
        except SourceExhausted:
            self._over = True
            self._look_again()
            self._progress.set()

    async def _credit(self, group: GroupRecord) -> None:
        """Gives every policy its samples of the group; a step that is to end at rest waits for that too."""
        self._owing[group.group] = set(self._queues)
        (credited,) = await self._parts.crediting.credit([group])
        if credited.samples:
            self._share(credited.group, credited.samples)
            self._parts.monitor.taken(group)
        else:
            del self._owing[group.group]
            self._parts.crediting.filtered(group.group, "no row has weight")
            self._progress.set()
        self._stream.taken(kept=bool(credited.samples))

    def _share(self, group: GroupId, samples: Mapping[PolicyName, Sequence[CreditedTurn]]) -> None:
        now = asyncio.get_running_loop().time()
        self._owing[group] = set(samples)
        for policy, of_policy in samples.items():
            self._queues[policy].shares.append(_Share(group, of_policy, now))
            self._queues[policy].changed.set()
        self._parts.events.emit(
            GroupReady(
                group=group,
                samples={policy: len(of_policy) for policy, of_policy in samples.items()},
                because="all its episodes are terminal",
            )
        )

    async def _train(self, policy: PolicyName) -> None:
        """One policy's life: a batch fills and is accumulated beside that, then it updates and is served."""
        session = self._parts.sessions[policy]
        while True:
            await self._first(policy)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.accumulate(), name=f"accumulate/{policy}")
                groups, divisors = await self._fill(policy)
                self._parts.crediting.end_batch(policy)
                self._parts.events.emit(BatchFilled(policy=policy, version=session.version, groups=tuple(groups)))
                session.close_step()
            weights = await self._parts.updates.update(policy, divisors)
            if weights:
                await self._parts.updates.serve(weights)
            for group in groups:
                self._updated_on(group, policy)

    async def _first(self, policy: PolicyName) -> None:
        queue = self._queues[policy]
        while not queue.shares:
            queue.changed.clear()
            await queue.changed.wait()

    async def _fill(self, policy: PolicyName) -> tuple[Sequence[GroupId], Divisors]:
        """Makes shares READY until there are enough, or the oldest has waited for too long, or no more are to come."""
        queue, groups, divisors = self._queues[policy], list[GroupId](), Divisors()
        due = queue.shares[0].came + self._timeout_s
        while len(groups) < self._parts.admission.law.groups:
            if queue.shares:
                share = queue.shares.popleft()
                await self._parts.crediting.make_ready(share.samples)
                self._parts.sessions[policy].notify_ready()
                self._parts.monitor.trained_on(policy, [sample.turn for sample in share.samples])
                divisors += divisors_of(share.samples)
                groups.append(share.group)
            elif self._over or not self._awake.is_set() or not await self._more(queue, due):
                break
        return groups, divisors

    async def _more(self, queue: _Queue, due: float) -> bool:
        """Waits for a change; False when the time is over."""
        queue.changed.clear()
        try:
            async with asyncio.timeout_at(due):
                await queue.changed.wait()
        except TimeoutError:
            return False
        return True

    def _look_again(self) -> None:
        for queue in self._queues.values():
            queue.changed.set()

    def _updated_on(self, group: GroupId, policy: PolicyName) -> None:
        self._owing[group].remove(policy)
        if not self._owing[group]:
            del self._owing[group]
            self._parts.admission.move(group, GroupState.TRAINED)
            self._trained.append(group)
            self._parts.feed.look_again()
            self._progress.set()
