"""Runs the views that several policies have of one engine, as if each had an engine of its own (`serves_together`).

    solver/0    view ──┐
                       ├──► engine: requests and loads of all views, in one batch
    verifier/0  view ──┘

consumes:     calls of the pool, from the instances of each policy
waits for:    the engine; at first, until the policy that asked first has started it
produces:     answers; an error once the engine is closed, by whichever view
unblocked by: the engine
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

from flexmarl.errors import EngineError, described
from flexmarl.inference.interface import EngineCapabilities, InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    EngineUse,
    Generation,
    GenerationProgress,
    GenerationRequest,
    InstanceId,
    PolicyName,
    Version,
)


class SharedEngine:
    """One engine of several policies. The first view that closes ends it for all: its policy has given it up."""

    def __init__(self) -> None:
        self.seats: set[PolicyName] = set()
        """The policies that have a view of it, or wait for one."""
        self.ended = ""
        """Why it serves nobody any more; empty while it does, or starts."""
        self.ending = asyncio.Lock()
        self.started: asyncio.Future[WeightedEngine] = asyncio.get_running_loop().create_future()

    def start(self, engine: InferenceEngine) -> None:
        """Gives the views their engine."""
        self.started.set_result(cast(WeightedEngine, engine))  # Its capabilities say which methods may be called.

    def fail(self, because: str) -> None:
        """Ends it before it has started."""
        self.ended = because
        self.started.set_exception(EngineError(because))
        self.started.exception()  # Perhaps no view waits for it.

    async def view(self, policy: PolicyName) -> "EngineView":
        """Returns the view of a policy, which has a seat, once the engine has started. Raises EngineError if not."""
        await asyncio.shield(self.started)
        return EngineView(self, policy)


class SharedEngines:
    """All engines of policies that are served together."""

    def __init__(self, spawn: Callable[[PolicyName, InstanceId], Awaitable[InferenceEngine]]) -> None:
        """`spawn` starts an engine for all of them, in the name of one of their instances."""
        self._spawn = spawn
        self._engines: list[SharedEngine] = []

    def add(self, engine: InferenceEngine) -> None:
        """Adds an engine that has started, of which nobody has a view."""
        shared = SharedEngine()
        shared.start(engine)
        self._engines.append(shared)

    def has_seat(self, policy: PolicyName) -> bool:
        """True if some engine is there, or starts, of which the policy has no view."""
        return self._free(policy) is not None

    async def view(self, policy: PolicyName, instance: InstanceId) -> "EngineView":
        """Returns a view of an engine of which the policy has none. If there is no such engine, starts one.

        Raises EngineError if another policy has started it and that failed, else the error of the start.
        """
        shared = self._free(policy)
        if shared is not None:
            shared.seats.add(policy)
            return await shared.view(policy)
        shared = SharedEngine()
        shared.seats.add(policy)
        self._engines = [*(one for one in self._engines if not one.ended), shared]
        try:
            shared.start(await self._spawn(policy, instance))
        except BaseException as error:
            shared.fail(f"the engine that '{policy}' shares did not start: {described(error)}")
            raise
        return await shared.view(policy)

    def _free(self, policy: PolicyName) -> SharedEngine | None:
        return next((one for one in self._engines if not one.ended and policy not in one.seats), None)


class EngineView:
    """`WeightedEngine` of one policy on a shared engine."""

    def __init__(self, shared: SharedEngine, policy: PolicyName) -> None:
        self.shared, self._policy = shared, policy

    @property
    def engine(self) -> WeightedEngine:
        """The engine of all views."""
        return self.shared.started.result()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request. Raises EngineError if another policy closes the engine meanwhile."""
        # The contract returns an AsyncIterator; each engine's is a generator, which ends its requests when it closes.
        async with aclosing(cast(Any, self._open().generate(requests))) as answers:
            async for generation in answers:
                self._open()  # An engine that closes ends its requests as if they had been aborted.
                yield generation

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests."""
        await self._open().abort(request_ids)

    async def usage(self) -> EngineUse:
        """The load of the whole engine."""
        return await self._open().usage()

    async def capabilities(self) -> EngineCapabilities:
        """The engine's."""
        return await self._open().capabilities()

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Loads a version of the view's policy."""
        if policy != self._policy:
            raise EngineError(f"this view of the engine is that of policy '{self._policy}', not of '{policy}'")
        return await self._open().load_weights(policy, version)

    async def sleep(self) -> None:
        """Frees the device's memory, for all policies."""
        await self._open().sleep()

    async def wake(self) -> None:
        """Wakes the engine up, for all policies."""
        await self._open().wake()

    async def close(self) -> None:
        """Closes the engine for all policies; returns when it is closed."""
        self.shared.ended = self.shared.ended or f"the engine that '{self._policy}' shares was given up by it"
        async with self.shared.ending:
            await self.engine.close()

    def _open(self) -> WeightedEngine:
        if self.shared.ended:
            raise EngineError(self.shared.ended)
        return self.engine
