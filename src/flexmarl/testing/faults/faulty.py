"""Wrappers that break a sound engine, trainer, store or task source at the moments that an injection gives.

    FaultyEngine("solver/0", ModelledEngine(costs, respond), Injection(plan))

A wrapper passes on by name all that it does not change, so a new method of an interface needs no code here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar

from flexmarl.errors import EngineError, StoreError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationProgress,
    GenerationRequest,
    InstanceId,
    LossReport,
    PolicyName,
    SampleId,
    Task,
    Version,
)
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledTrainer
from flexmarl.tasks import SourceExhausted, TaskSource
from flexmarl.testing.faults.fault_plan import FaultKind
from flexmarl.testing.faults.injection import Injection
from flexmarl.training.interface import RowReader

T = TypeVar("T")
READS = frozenset({"get", "counts", "query"})
"""Calls of a store that change nothing. They are never refused or counted."""


class Around(Generic[T]):
    """A wrapper. Attributes that a subclass does not define are those of the wrapped object."""

    def __init__(self, inner: T) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # It is not set yet while a copy is made; without this, the lookup recurses.
            raise AttributeError(name)
        return getattr(self.inner, name)


class FaultyEngine(Around[ModelledEngine]):
    """An engine that falls silent, refuses or spoils loads, and fails requests, as an injection says."""

    def __init__(self, instance: InstanceId, inner: ModelledEngine, injection: Injection) -> None:
        super().__init__(inner)
        self._instance, self._injection = instance, injection
        self._silent = False

    def mute(self) -> None:
        """Injects a fault: no call returns any more, not even `close`."""
        self._silent = True

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Answers requests. Those that the plan fails keep their tokens, but end with finish `error`."""
        failing = {
            request.request_id
            for request in requests
            if self._injection.stricken(FaultKind.ENGINE_ERRORS, request.policy)
        }
        await self._until_heard()
        async with aclosing(self.inner.generate(requests)) as answers:  # type: ignore[type-var]
            async for generation in answers:
                await self._until_heard()
                if isinstance(generation, Generation) and generation.request_id in failing:
                    because = "it could not be served, as planned"
                    generation = replace(generation, finish=FinishReason.ERROR, error=because)
                yield generation

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests."""
        await self._until_heard()
        await self.inner.abort(request_ids)

    async def usage(self) -> EngineUse:
        """Returns the current load."""
        await self._until_heard()
        return await self.inner.usage()

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Loads weights. A load that the plan fails raises EngineError, or returns the checksum of other bytes."""
        await self._until_heard()
        fault = self._injection.occurs(FaultKind.FAILED_PUBLISH, self._instance)
        if fault and fault.how == "refused":
            raise EngineError(f"{self._instance} refused to load version {version}, as planned")
        held = await self.inner.load_weights(policy, version)
        return Checksum("other bytes") if fault else held

    async def sleep(self) -> None:
        """Stops decoding."""
        await self._until_heard()
        await self.inner.sleep()

    async def wake(self) -> None:
        """Resumes decoding."""
        await self._until_heard()
        await self.inner.wake()

    async def close(self) -> None:
        """Ends running requests."""
        await self._until_heard()
        await self.inner.close()

    async def _until_heard(self) -> None:
        if self._silent:
            await asyncio.Event().wait()


class AroundTrainer(Around[Any]):
    """A wrapper of a ModelledTrainer, or of another wrapper."""

    @property
    def rows(self) -> RowReader:
        """The reader through which the trainer gets its rows."""
        return self.inner.rows

    @rows.setter
    def rows(self, rows: RowReader) -> None:
        self.inner.rows = rows


class FaultyTrainer(AroundTrainer):
    """A trainer that dies, loses its gradient cache, or measures time wrongly, as an injection says."""

    def __init__(self, inner: ModelledTrainer, injection: Injection) -> None:
        super().__init__(inner)
        self._injection = injection
        self._skew_s = 0.0

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Accumulates a micro-batch, unless the trainer dies halfway."""
        inner, injection, policy = self.inner, self._injection, self.inner.policy
        if fault := injection.occurs(FaultKind.CLOCK_SKEW, policy):
            self._skew_s = fault.amount
        if injection.occurs(FaultKind.LOST_TRAINER, policy):
            half_s = inner.costs.sample_s * len(ids) / 2
            asyncio.get_running_loop().call_later(half_s, inner.fail, "as planned")
            await asyncio.sleep(half_s)
        report = await inner.accumulate(micro_batch_id, ids)
        if injection.occurs(FaultKind.LOST_CACHE, policy):
            inner.lose_cache()
        return replace(report, duration_s=report.duration_s + self._skew_s)


class AroundStore(Around[ExperienceStore]):
    """A wrapper of a store. Each of the store's calls goes through `call`."""

    def __getattr__(self, name: str) -> Any:
        inner: Any = super().__getattr__(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(name, partial(inner, *args, **kwargs))

        return call if callable(inner) else inner

    async def call(self, name: str, do: Callable[[], Awaitable[Any]]) -> Any:
        """Makes the call `name`; `do` makes it at the wrapped store."""
        return await do()


class SlowStore(AroundStore):
    """A store whose calls begin up to `longest_s` seconds late, so that they overtake one another."""

    def __init__(self, inner: ExperienceStore, *, longest_s: float, random: Random) -> None:
        super().__init__(inner)
        self._longest_s, self._random = longest_s, random

    async def call(self, name: str, do: Callable[[], Awaitable[Any]]) -> Any:
        """Waits for a random time, then makes the call."""
        if self._longest_s:
            await asyncio.sleep(self._random.uniform(0.0, self._longest_s))
        return await do()


class MortalStore(AroundStore):
    """The store as a process has it that may die. `check_alive` raises when it has died: it changes nothing then."""

    def __init__(self, inner: ExperienceStore, check_alive: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check_alive = check_alive

    async def close(self) -> None:
        """Does nothing: the store is the controller's."""

    async def call(self, name: str, do: Callable[[], Awaitable[Any]]) -> Any:
        """Makes the call. Raises what `check_alive` raises."""
        self._check_alive()
        return await do()


class FaultyStore(AroundStore):
    """A store that refuses a write, or whose caller is killed right after a write, as an injection says.

    `check_alive` raises when the life that uses this object is over. The tasks of a killed process still run while they
    are torn down, and they must not change the store.
    """

    def __init__(
        self, inner: ExperienceStore, injection: Injection, check_alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(inner)
        self._injection, self._check_alive = injection, check_alive

    async def close(self) -> None:
        """Does nothing: the store outlives a life."""

    async def call(self, name: str, do: Callable[[], Awaitable[Any]]) -> Any:
        """Makes the call. Raises StoreError if the plan refuses it."""
        self._check_alive()
        if name in READS:
            return await do()
        if self._injection.occurs(FaultKind.STORE_FAILURE):
            raise StoreError("the experience store refused a write, as planned")
        result = await do()
        self._injection.store_called()
        self._check_alive()
        return result


class FaultySource(Around[TaskSource]):
    """A task source that ends too early."""

    def __init__(self, inner: TaskSource, injection: Injection) -> None:
        super().__init__(inner)
        self._injection = injection

    def train(self, index: int) -> Task:
        """Returns the task at position `index`. Raises SourceExhausted past the planned end."""
        if self._injection.exhausts(index):
            raise SourceExhausted(f"tasks: there is no training task at position {index}, as planned")
        return self.inner.train(index)
