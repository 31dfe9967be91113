"""Runs training in which every policy updates on its own, as its own batch fills (`pipeline.updates: per_policy`).

                     ┌► solver's batch   ████████ update, serve   ████████ update ...
  stream ──► credit ─┤
                     └► verifier's batch ██ (timeout) update, serve   ████ ...      a group's slot is free when
                                                                                    all its policies have updated on it

consumes    kept groups, in the order of the window
waits for   per policy: P groups with samples of the policy, or the timeout of the oldest of them
produces    updates of each policy at its own pace, served; a step is done when P groups are trained
unblocked by the stream, the timeout, or a step that must end at rest: then every batch ends early
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from flexmarl.events.event import Events
from flexmarl.events.group_events import BatchFilled, GroupReady
from flexmarl.events.notices import EpisodesTaken, TurnsTaken
from flexmarl.orchestrator.asynchronous import Stream
from flexmarl.orchestrator.crediting import Crediting
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.publish import Updates
from flexmarl.records import CreditedTurn, Divisors, GroupId, GroupRecord, GroupState, PolicyName
from flexmarl.rollout.admission import Admission
from flexmarl.tasks import SourceExhausted
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.session import TrainingSession


@dataclass(frozen=True, slots=True)
class _Share:
    """One policy's samples of one group, which came at time `came`."""

    group: GroupId
    samples: Sequence[CreditedTurn]
    came: float


@dataclass(slots=True)
class _Queue:
    """Shares of one policy that are not in a batch yet."""

    shares: deque[_Share] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class PerPolicy:
    """Steps in which each policy fills its own batches. A group is trained when all its policies have updated on it."""

    def __init__(
        self,
        *,
        stream: Stream,
        feed: Feed,
        crediting: Crediting,
        admission: Admission,
        sessions: Mapping[PolicyName, TrainingSession],
        updates: Updates,
        events: Events,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: seconds after which a batch is trained as it is, counted from its first group."""
        self._stream, self._feed, self._crediting, self._admission = stream, feed, crediting, admission
        self._sessions, self._updates, self._events = sessions, updates, events
        self._timeout_s = timeout_s
        self._queues = {policy: _Queue() for policy in sessions}
        self._owing: dict[GroupId, set[PolicyName]] = {}
        """Policies that have not updated on each group yet; while the group is being credited, all policies."""
        self._trained: list[GroupId] = []
        """Groups of this step on which all their policies have updated."""
        self._progress = asyncio.Event()
        self._awake = asyncio.Event()
        self._held: GroupRecord | None = None
        """The group that was taken from the stream and is not handed out yet; at rest it waits for the next step."""
        self._over = False
        """True if no more groups will come."""
        self._step = 0

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Rollout and the training of every policy run while the block lasts."""
        async with self._stream.playing(), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._hand_out(), name="hand-out")]
            working += [tasks.create_task(self._train(policy), name=f"train/{policy}") for policy in self._queues]
            yield
            for task in working:
                task.cancel()
            if self._held:
                self._stream.give_back(self._held)

    async def step(self, step: int, *, rest: Callable[[], bool]) -> Sequence[GroupId]:
        """Waits until at least P groups are trained, and returns them.

        If `rest()` is then True, all batches end early, and it waits until every group that was handed out is trained.
        """
        self._step, self._trained = step, []
        self._awake.set()
        while len(self._trained) < self._feed.num_groups:
            if self._over and not self._owing:
                raise SourceExhausted(f"step {step + 1} cannot be filled: {self._feed.exhausted}")
            await self._wait()
        if rest():
            self._awake.clear()
            self._look_again()
            while self._owing:
                await self._wait()
        return self._trained

    async def _wait(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _hand_out(self) -> None:
        """Takes groups from the stream, and gives each one to its policies."""
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
        """Credits a group, and gives every policy its samples. A step that ends at rest waits for that too."""
        self._owing[group.group] = set(self._queues)
        (credited,) = await self._crediting.credit([[group]])
        if credited.samples:
            self._share(credited.group, credited.samples)
            self._events.emit(EpisodesTaken(episodes=group.finished))
        else:
            del self._owing[group.group]
            self._crediting.filtered(group.group, "no row has weight")
            self._progress.set()
        self._stream.taken(kept=bool(credited.samples))

    def _share(self, group: GroupId, samples: Mapping[PolicyName, Sequence[CreditedTurn]]) -> None:
        now = asyncio.get_running_loop().time()
        self._owing[group] = set(samples)
        for policy, of_policy in samples.items():
            self._queues[policy].shares.append(_Share(group, of_policy, now))
            self._queues[policy].changed.set()
        counts = {policy: len(of_policy) for policy, of_policy in samples.items()}
        self._events.emit(GroupReady(group=group, samples=counts, because="all its episodes are terminal"))

    async def _train(self, policy: PolicyName) -> None:
        """Trains one policy: accumulates each batch while it fills, then updates and serves the policy."""
        session = self._sessions[policy]
        while True:
            await self._first(policy)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.accumulate(), name=f"accumulate/{policy}")
                groups, divisors = await self._fill(policy)
                self._crediting.end_batch(policy)
                self._events.emit(BatchFilled(policy=policy, version=session.version, groups=tuple(groups)))
                session.close_step()
            weights = await self._updates.update(policy, divisors)
            if weights:
                await self._updates.serve(weights)
            for group in groups:
                self._updated_on(group, policy)

    async def _first(self, policy: PolicyName) -> None:
        queue = self._queues[policy]
        while not queue.shares:
            queue.changed.clear()
            await queue.changed.wait()

    async def _fill(self, policy: PolicyName) -> tuple[Sequence[GroupId], Divisors]:
        """Makes shares READY until the batch has P groups, its first share is overdue, no more come, or a rest begins.

        Returns the groups and the divisors of the batch.
        """
        queue, groups, divisors = self._queues[policy], list[GroupId](), Divisors()
        due = queue.shares[0].came + self._timeout_s
        while len(groups) < self._feed.num_groups:
            if queue.shares:
                share = queue.shares.popleft()
                await self._crediting.make_ready(share.samples)
                turns = [sample.turn for sample in share.samples]
                self._events.emit(TurnsTaken(policy=policy, turns=turns))
                divisors += divisors_of(share.samples)
                groups.append(share.group)
            elif self._over or not self._awake.is_set() or not await self._more(queue, due):
                break
        return groups, divisors

    async def _more(self, queue: _Queue, due: float) -> bool:
        """Waits for a change of the queue. Returns False at the time `due`."""
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
            self._admission.move(group, GroupState.TRAINED)
            self._trained.append(group)
            self._feed.look_again()
            self._progress.set()
