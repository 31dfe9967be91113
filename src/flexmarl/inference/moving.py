"""Runs one instance's move from a policy to another.

    live at the source --> leaving --> empty --> loads the target's newest weights --> live at the target
                                                 (or returns, if the source has lost all its other instances)

consumes:     an instance that has just left its policy
waits for:    its present load and its requests, then its load of the target's weights
produces:     an instance of the target, under a new name; or a lost instance, which the target replaces
unblocked by: answers or aborts, with on_move `continue` after twice the grace period at most; the timeout of a load
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


class InstanceMove:
    """The move of one instance from a source policy to a target policy."""

    def __init__(self, instance: Instance, source: Instances, target: Instances, settings: PoolSettings) -> None:
        self._instance, self._source, self._target, self._settings = instance, source, target, settings
        self.became: InstanceId | None = None
        """Id of the instance after the move; None if it is lost before it gets one, or the move has not ended."""
        self.failure = "the pool was left meanwhile"
        """Why it does not serve the target; "" if it does."""

    async def run(self) -> None:
        """Moves the instance. `became` and `failure` then hold the result."""
        instance, source, target = self._instance, self._source, self._target
        with target.expecting():
            await self._empty()
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
