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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from flexmarl.errors import EpisodeError
from flexmarl.events.group_events import Refilled
from flexmarl.orchestrator.parts import Parts
from flexmarl.orchestrator.publish import Gate, NewWeights
from flexmarl.records import Divisors, GroupId, GroupRecord, PolicyName

Closed = asyncio.Future[Mapping[PolicyName, Divisors]]
"""The divisors of the step's batches, by policy; known when its collection is closed."""
Rolling = asyncio.Task[Exception | None]
"""A step's rollout. It returns its error, for the step to raise: the step may begin after the rollout has failed."""


class Synchronous:
    """Steps in which every token is sampled at the step's version."""

    def __init__(self, parts: Parts, *, colocated: bool = False, gate: Gate | None = None) -> None:
        """With a gate, the next step's rollout begins before the updates. Calls of all episodes must pass that gate."""
        self._parts = parts
        self._colocated = colocated
        self._gate = gate
        self._failures: list[str] = []
        self._unserved: list[NewWeights] = []
        self._beside: asyncio.TaskGroup
        if parts.crediting.streams:
            parts.collector.stream_to(parts.sessions)
        self._rollout: Rolling | None = None
        """Rollout of the next step, if it has begun already."""

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Plays rollouts while the block lasts."""
        async with asyncio.TaskGroup() as self._beside:
            yield

    async def step(self, step: int, *, rest: bool) -> Sequence[GroupId]:
        """Makes one step. Returns the groups that were trained in it."""
        parts, rollout = self._parts, self._rollout or self._play(step)
        closed: Closed = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            for policy in parts.sessions:
                tasks.create_task(self._train(policy, closed), name=f"train/{policy}")
            if error := await rollout:
                raise error
            if parts.balancer:
                parts.balancer.rollout_ended()
            self._check_alive(step)
            self._note_refill(step)
            if self._colocated:
                await parts.pool.sleep()
            divisors, kept = await parts.collector.close(), parts.collector.kept
            self._rollout = self._play_ahead(step + 1) if self._gate and not rest else None
            closed.set_result(divisors)
            for session in parts.sessions.values():
                session.close_step()
        if self._colocated:
            await self._change_places()
        return parts.collector.settle_trained(kept)

    def _play(self, step: int) -> Rolling:
        """Begins a step's rollout, and the collection of its groups."""
        self._parts.collector.open()
        self._failures = []
        return self._beside.create_task(self._roll_out(step), name=f"rollout/step-{step}")

    def _play_ahead(self, step: int) -> Rolling:
        assert self._gate is not None
        self._gate.shut(self._parts.sessions)
        return self._play(step)

    async def _roll_out(self, step: int) -> Exception | None:
        parts = self._parts
        try:
            with parts.monitor.rollout(step):
                groups = parts.feed.groups(step, parts.collector.refill)
                await parts.rollout.play(groups, self._finished, parts.collector.take_episode)
        except Exception as error:  # Raising it here would also cancel the updates of the previous step.
            return error
        return None

    async def _train(self, policy: PolicyName, closed: Closed) -> None:
        """Trains, updates and serves one policy. It waits for the policy's own rows, and for no other policy."""
        await self._parts.sessions[policy].accumulate()
        weights = await self._parts.updates.update(policy, (await closed)[policy])
        if weights and self._colocated:
            self._unserved.append(weights)
        elif weights:
            await self._parts.updates.serve(weights)
        if self._gate:
            self._gate.open(policy)

    async def _change_places(self) -> None:
        """Suspends the trainers, wakes the engines on the freed devices, and has them load the new weights."""
        if self._parts.residency:
            await self._parts.residency.suspend_all()
        await self._parts.pool.wake()
        unserved, self._unserved = self._unserved, []
        async with asyncio.TaskGroup() as tasks:
            for weights in unserved:
                tasks.create_task(self._parts.updates.serve(weights), name=f"publish/{weights.policy}")

    async def _finished(self, group: GroupRecord) -> None:
        self._parts.monitor.group_finished(group)
        self._failures += [] if group.finished else [group.episodes[-1].reason]
        for judged in await self._parts.collector.take(group):
            self._parts.monitor.judged(judged.effects, judged.parts)
        self._parts.feed.look_again()

    def _note_refill(self, step: int) -> None:
        refill = self._parts.collector.refill
        if refill.refills:
            self._parts.events.emit(
                Refilled(step=step, generated=refill.admitted, kept=refill.kept, because=refill.because)
            )

    def _check_alive(self, step: int) -> None:
        """Raises EpisodeError if every group of the step failed: a workflow, tool or engine must be broken."""
        if len(self._failures) == self._parts.collector.refill.admitted:
            raise EpisodeError(
                f"step {step}: none of its {len(self._failures)} groups had a finished episode; "
                f"the last reason: {self._failures[-1]}"
            )
