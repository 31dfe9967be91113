"""Runs what changes a policy's number of instances on purpose: a move to another policy, a growth, a retirement.

    live at the source --> leaving --> empty --> loads the target's newest weights --> live at the target
                                         |   '-> ends; one of the target starts ----^  (engines of different kinds)
                                         |-----> ends                                  (a grown one retires)
                                         '-----> returns, if the source has lost all its other instances

consumes:     an instance that has just left its policy; for a growth, free room
waits for:    its present load and its requests, then the load of the target's weights, or the start of a new engine
produces:     an instance of the target, under a new name; or a lost instance, which the target replaces
unblocked by: answers or aborts, with on_move `continue` after twice the grace period at most; the timeout of a load or
              of a start
"""

import asyncio
import contextlib
from collections.abc import Sequence

from flexmarl.inference.calls import Instance
from flexmarl.inference.instances import Instances
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import InstanceId

_TIMES_ASKED = 2
"""Aborts per request. A request that reaches the engine just after the first abort is ended by the second one."""


class _Departure:
    """An instance that has left its policy, until it has no requests."""

    def __init__(self, instance: Instance, source: Instances, settings: PoolSettings) -> None:
        self._instance, self._source, self._settings = instance, source, settings
        self.became: InstanceId | None = None
        """Id of the instance afterwards; None if it is lost before it gets one, or has not ended."""
        self.failure = "the pool was left meanwhile"
        """The reason if it did not succeed; "" if it did."""

    def _cannot_go(self) -> bool:
        return self._instance.lost or self._source.is_empty

    async def _stay(self) -> None:
        source = self._source
        with source.expecting():
            source.left(self._instance)
            self.became, self.failure = await source.take_in(self._instance)
        self.failure = self.failure or f"'{source.policy}' has lost its other instances meanwhile, so it stays"

    async def _empty(self) -> None:
        """Returns when the instance has no load and no request, or is lost."""
        instance = self._instance
        if instance.loading is not None:
            await asyncio.wait([instance.loading])
        if self._settings.on_move == "continue" and self._source.continues:
            await self._hand_over()
        while instance.tasks:
            await asyncio.wait(instance.tasks)

    async def _hand_over(self) -> None:
        """Aborts the requests, so that they continue at other instances. An instance that does not end them is lost."""
        instance, grace_s = self._instance, self._settings.abort_grace_s
        instance.hands_over = True
        for _ in range(_TIMES_ASKED):
            if instance.tasks:
                await self._abort(sorted(instance.running))
            if instance.tasks:
                await asyncio.wait(instance.tasks, timeout=grace_s)
        if instance.tasks:
            self._source.lose(instance.name, f"it did not end its requests within {_TIMES_ASKED * grace_s} s")

    async def _abort(self, request_ids: Sequence[str]) -> None:
        # An engine that fails here, or hangs, does not end its requests either: `_hand_over` then gives it up.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._settings.abort_grace_s):
                await self._instance.engine.abort(request_ids)


class InstanceMove(_Departure):
    """The move of one instance from a source policy to a target policy.

    If it `starts`, the engine ends and one of the target starts in its place; else it loads the target's weights.
    """

    def __init__(
        self, instance: Instance, source: Instances, target: Instances, settings: PoolSettings, *, starts: bool = False
    ) -> None:
        super().__init__(instance, source, settings)
        self._target, self.starts = target, starts

    async def run(self) -> None:
        """Moves the instance. `became` and `failure` then hold the result."""
        instance, source, target = self._instance, self._source, self._target
        with target.expecting():
            await self._empty()
            if self.starts and not self._cannot_go():
                source.left(instance)  # From here on nobody can take it back.
                self.became, self.failure = await target.take_over(instance)
                return
            if not self._cannot_go():
                self.became, self.failure = await target.take_in(instance, unless=self._cannot_go)
            if self.became:
                source.left(instance)
            elif instance.lost:
                source.left(instance)
                target.replace(instance)
                self.failure = source.lost[instance.name]
            else:
                await self._stay()


class InstanceRetirement(_Departure):
    """The end of one instance whose room is missed elsewhere."""

    async def run(self) -> None:
        """Ends the instance. `failure` then says why it did not, or is empty."""
        instance, source = self._instance, self._source
        await self._empty()
        if self._cannot_go() and not instance.lost:
            await self._stay()
            return
        source.left(instance)
        await source.close(instance)
        self.failure = source.lost.get(instance.name, "")


class InstanceGrowth:
    """The start of one more instance of a policy."""

    def __init__(self, target: Instances) -> None:
        self._target = target
        self.became: InstanceId | None = None
        """Id of the new instance; None until it serves."""
        self.failure = "the pool was left meanwhile"
        """Why it does not serve; "" if it does."""

    async def run(self) -> None:
        """Starts the instance. `became` and `failure` then hold the result."""
        name, self.failure = await self._target.grow()
        self.became = None if self.failure else name
