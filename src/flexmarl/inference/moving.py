"""Runs one instance's move from a policy to another.

    live at the source --> leaving --> empty --> loads the target's newest weights --> live at the target
                                                 (or the source's, even then: it is needed there again)

consumes:     an instance that has just left its policy
waits for:    what it still loads and runs, then its load of the other policy's weights
produces:     an instance of the target, under a name of its own; or a lost one, which the target replaces
unblocked by: answers or aborts; with on_move `continue`, twice the grace period at most; the timeout of a load
"""

import asyncio
import contextlib
from collections.abc import Sequence

from flexmarl.inference.calls import Instance
from flexmarl.inference.instances import Instances
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import InstanceId

_TIMES_ASKED = 2
"""A request that came to the engine in the very moment of the first abort hears the second one."""


class Move:
    """One instance on its way."""

    def __init__(self, instance: Instance, source: Instances, target: Instances, settings: PoolSettings) -> None:
        self._instance, self._source, self._target, self._settings = instance, source, target, settings
        self.became: InstanceId | None = None
        """The id under which it serves now."""
        self.failure = "the pool was left meanwhile"
        """Why it does not serve the target, or nothing."""

    async def run(self) -> None:
        """Moves the instance; `became` and `failure` say how it ended."""
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
        return self._instance.lost or self._source.bereft

    async def _stay(self) -> None:
        source = self._source
        with source.expecting():
            source.left(self._instance)
            self.became, self.failure = await source.take_in(self._instance)
        self.failure = self.failure or f"'{source.policy}' has lost its other instances meanwhile, so it stays"

    async def _empty(self) -> None:
        """Returns when the instance runs nothing, or is lost."""
        instance = self._instance
        if instance.loading is not None:
            await asyncio.wait([instance.loading])
        if self._settings.on_move == "continue" and self._source.continues:
            await self._hand_over()
        while instance.tasks:
            await asyncio.wait(instance.tasks)

    async def _hand_over(self) -> None:
        """Has the requests end here, so that they go on elsewhere."""
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
        # An engine that fails in this, or hangs, does not end its requests either, and so is lost.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._settings.abort_grace_s):
                await self._instance.engine.abort(request_ids)
