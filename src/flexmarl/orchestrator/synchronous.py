"""Runs one step of the synchronous modes: rollout, collection and training, then the update and serving of each policy.

  feed ──► rollout ──► collect ──► per policy: accumulate ──► update ──► serve ──► next step
           (groups)    (credit)

  sync         rows become READY when rollout has ended
  microbatch   rows become READY when their group is complete, so training is hidden behind rollout
  colocated    as sync; engines sleep while trainers hold the devices, and trainers leave them before engines wake
  ahead        with a gate (publish.py): the next step's rollout begins when this one's has ended, and each of its calls
               waits for its own policy's new version

consumes    the step's tasks
waits for   its groups to end; each policy for its own rows and instances only
produces    one update of each active policy, served
unblocked by each of these in turn; any failure ends the step as an exception
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from flexmarl.errors import EpisodeError
from flexmarl.events.event import Events
from flexmarl.events.group_events import Refilled, RolloutEnded
from flexmarl.events.notices import StepPlayed, phase
from flexmarl.events.safe_json import masked
from flexmarl.events.training_events import Rested
from flexmarl.orchestrator.collect import StepCollector
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.publish import Gate, NewWeights, Updates
from flexmarl.records import CONTROLLER, Divisors, GroupId, GroupRecord, PolicyName
from flexmarl.rollout.rollout import Rollout
from flexmarl.training.colocated import ColocatedResidency
from flexmarl.training.session import TrainingSession

Closed = asyncio.Future[Mapping[PolicyName, Divisors]]
"""The divisors of the step's batches, by policy; known when its collection is closed."""
Rolling = asyncio.Task[Exception | None]
"""A step's rollout. It returns its error, for the step to raise: the step may begin after the rollout has failed."""


class Colocation:
    """The change of places of engines and trainers, once in each step of the mode `colocated`."""

    def __init__(self, *, residency: ColocatedResidency, updates: Updates) -> None:
        self._residency, self._updates = residency, updates
        self._unserved: list[NewWeights] = []

    async def to_training(self) -> None:
        """Puts the engines to sleep, so that trainers can hold the devices."""
        await self._residency.begin_training()

    def serve_later(self, weights: NewWeights) -> None:
        """Notes weights that engines load when they have the devices again."""
        self._unserved.append(weights)

    async def to_rollout(self) -> None:
        """Suspends the trainers, wakes the engines on the freed devices, and has them load the new weights."""
        await self._residency.end_training()
        unserved, self._unserved = self._unserved, []
        async with asyncio.TaskGroup() as tasks:
            for weights in unserved:
                tasks.create_task(self._updates.serve(weights), name=f"publish/{weights.policy}")


class Synchronous:
    """Steps in which every token is sampled at the step's version."""

    def __init__(
        self,
        *,
        feed: Feed,
        rollout: Rollout,
        collector: StepCollector,
        sessions: Mapping[PolicyName, TrainingSession],
        updates: Updates,
        events: Events,
        colocation: Colocation | None = None,
        gate: Gate | None = None,
    ) -> None:
        """With a gate, the next step's rollout begins before the updates. Calls of all episodes must pass that gate."""
        self._feed, self._rollout, self._collector = feed, rollout, collector
        self._sessions, self._updates, self._events = sessions, updates, events
        self._colocation, self._gate = colocation, gate
        self._failures: list[str] = []
        self._beside: asyncio.TaskGroup
        self._ahead: Rolling | None = None
        """Rollout of the next step, if it has begun already."""

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Plays rollouts while the block lasts."""
        async with asyncio.TaskGroup() as self._beside:
            yield

    async def step(self, step: int, *, rest: Callable[[], bool]) -> Sequence[GroupId]:
        """Makes one step. Returns the groups that were trained in it."""
        rollout, collector = self._ahead or self._play(step), self._collector
        closed: Closed = asyncio.get_running_loop().create_future()
        resting = collector.resting
        active = {policy: session for policy, session in self._sessions.items() if policy not in resting}
        for policy, because in resting.items():
            self._events.emit(Rested(policy=policy, step=step, because=because))
        async with asyncio.TaskGroup() as tasks:
            for policy in active:
                tasks.create_task(self._train(policy, closed), name=f"train/{policy}")
            if error := await rollout:
                raise error
            self._events.emit(StepPlayed(step=step, pauses=True))
            self._check_alive(step)
            self._note_refill(step)
            if self._colocation:
                await self._colocation.to_training()
            divisors, kept = await collector.close(), collector.kept
            self._ahead = self._play_ahead(step + 1) if self._gate and not rest() else None
            closed.set_result(divisors)
            for session in active.values():
                session.close_step()
            if self._gate:
                for policy in resting:
                    self._gate.open(policy)
        if self._colocation:
            await self._colocation.to_rollout()
        return collector.settle_trained(kept)

    def _play(self, step: int) -> Rolling:
        """Begins a step's rollout, and the collection of its groups."""
        self._collector.open(step)
        self._failures = []
        return self._beside.create_task(self._roll_out(step), name=f"rollout/step-{step}")

    def _play_ahead(self, step: int) -> Rolling:
        assert self._gate is not None
        self._gate.shut(self._sessions)
        return self._play(step)

    async def _roll_out(self, step: int) -> Exception | None:
        groups, began = self._feed.groups(step, self._collector.refill), self._events.now()
        try:
            with phase(self._events, "rollout"):
                await self._rollout.play(groups, self._finished, self._collector.take_episode)
        except Exception as error:  # Raising it here would also cancel the updates of the previous step.
            return error
        finally:
            self._events.emit(RolloutEnded(process=CONTROLLER, began=began, step=step))
        return None

    async def _train(self, policy: PolicyName, closed: Closed) -> None:
        """Trains, updates and serves one policy. It waits for the policy's own rows, and for no other policy."""
        await self._sessions[policy].accumulate()
        weights = await self._updates.update(policy, (await closed)[policy])
        if weights and self._colocation:
            self._colocation.serve_later(weights)
        elif weights:
            await self._updates.serve(weights)
        if self._gate:
            self._gate.open(policy)

    async def _finished(self, group: GroupRecord) -> None:
        self._failures += [] if group.finished else [group.episodes[-1].reason_and_place]
        await self._collector.take(group)
        self._feed.look_again()

    def _note_refill(self, step: int) -> None:
        refill = self._collector.refill
        if refill.refills:
            self._events.emit(Refilled(step=step, generated=refill.admitted, kept=refill.kept, because=refill.because))

    def _check_alive(self, step: int) -> None:
        """Raises EpisodeError if every group of the step failed: a workflow, tool or engine must be broken."""
        if len(self._failures) == self._collector.refill.admitted:
            raise EpisodeError(
                f"step {step + 1}: none of its {len(self._failures)} groups had a finished episode; "
                f"the last reason: {masked(self._failures[-1])}"
            )
