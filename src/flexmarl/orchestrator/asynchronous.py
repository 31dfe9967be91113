"""Runs one step of the asynchronous modes: a batch of groups is trained while others go on playing.

  stream ──► credit ──► per policy: accumulate ──► update ──► serve ──► slots free
  (never waits)

At most S + ceil((W - 1) / P) versions lie between sampling and training (docs/math.md, section 9), and `collector.add`
checks it.

consumes    kept groups, in the order of the window
waits for   as many of them as make a step; each policy for its own rows and instances only
produces    one update of each active policy, served; then the groups' slots are free
unblocked by the stream, which ends what holds it up; any failure ends the step as an exception
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from flexmarl.orchestrator.parts import Parts
from flexmarl.orchestrator.stream import Stream
from flexmarl.records import Divisors, GroupId, GroupRecord, PolicyName


class Asynchronous:
    """Steps that all policies make together, beside a rollout that goes on."""

    def __init__(self, parts: Parts, stream: Stream) -> None:
        self._parts = parts
        self._stream = stream

    def playing(self) -> AbstractAsyncContextManager[None]:
        """Rollout goes on in this block."""
        return self._stream.playing()

    async def step(self, step: int, *, rest: bool) -> Sequence[GroupId]:
        """Makes one step; the groups that were trained in it. Training always comes to rest."""
        parts = self._parts
        parts.collector.open()
        closed: asyncio.Future[Mapping[PolicyName, Divisors]] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            for policy in parts.sessions:
                tasks.create_task(self._train(policy, closed), name=f"train/{policy}")
            await self._collect(step)
            closed.set_result(await parts.collector.close())
            for session in parts.sessions.values():
                session.close_step()
            if parts.balancer:
                parts.balancer.rollout_ended(pauses=False)
        trained = parts.collector.settle_trained(parts.collector.kept)
        parts.feed.look_again()
        return trained

    async def _collect(self, step: int) -> None:
        parts, groups = self._parts, self._parts.admission.law.groups
        if parts.crediting.batch_wide:
            await self._add([await self._stream.next(step) for _ in range(groups)])
        else:
            while len(parts.collector.kept) < groups:
                await self._add([await self._stream.next(step)])

    async def _add(self, groups: Sequence[GroupRecord]) -> None:
        parts, before = self._parts, len(self._parts.collector.kept)
        await parts.collector.add(groups, max_staleness=parts.admission.law.max_staleness)
        self._stream.taken(kept=len(parts.collector.kept) > before)
        for group in groups:
            parts.monitor.taken(group)
            for policy in parts.sessions:
                turns = [turn for episode in group.finished for turn in episode.turns if turn.policy == policy]
                parts.monitor.trained_on(policy, turns)

    async def _train(self, policy: PolicyName, closed: "asyncio.Future[Mapping[PolicyName, Divisors]]") -> None:
        await self._parts.sessions[policy].accumulate()
        weights = await self._parts.updates.update(policy, (await closed)[policy])
        if weights:
            await self._parts.updates.serve(weights)
