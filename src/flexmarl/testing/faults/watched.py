"""Wrappers around engines, trainers and events that remember what the laws check."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from flexmarl.events.event import Notice
from flexmarl.events.journal import RememberedEvents
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    CreditLine,
    Divisors,
    Generation,
    GenerationProgress,
    GenerationRequest,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Version,
)
from flexmarl.simulator.modelled_cache import CachedSums, ModelledCache
from flexmarl.testing.faults.faulty import Around, AroundTrainer
from flexmarl.training.interface import UpdateReport


class Killed(BaseException):
    """Raised in a life whose process is dead. As a BaseException it passes error handlers, as kill -9 would."""


class Pulse:
    """Switch that ends the process of one life."""

    def __init__(self) -> None:
        self.over = False

    def stop(self) -> None:
        """Ends the process: from now on `check` raises."""
        self.over = True

    def check(self) -> None:
        """Raises Killed if the process has ended."""
        if self.over:
            raise Killed


class MortalEvents(RememberedEvents):
    """Events of a process that can die. A dead process emits none. The clock stops when the run has ended."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(self._time)
        self._pulse = pulse
        self._last = 0.0

    def emit(self, event: Notice) -> None:
        """Emits an event. Raises Killed if the process is dead."""
        self._pulse.check()
        super().emit(event)

    def _time(self) -> float:
        try:
            self._last = asyncio.get_running_loop().time()
        except RuntimeError:  # The run has ended, and its failure is being recorded.
            return self._last
        return self._last


class Answered(NamedTuple):
    """An answer of an engine; `at` is the time when it came."""

    at: float
    request: GenerationRequest
    generation: Generation


class WatchedEngine(Around[Any]):
    """An engine that remembers its requests, answers and loads."""

    def __init__(self, inner: Any) -> None:
        """`inner` is a WeightedEngine."""
        super().__init__(inner)
        self.asked: list[GenerationRequest] = []
        self.answered: list[Answered] = []
        self.loads: list[tuple[float, PolicyName, Version, Checksum]] = []
        """For each load: its time, policy and version, and the engine's own checksum afterwards."""
        self.most_running = 0
        """The most unanswered requests that the engine had at any time."""
        self._given = set[str]()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order."""
        self._given.update(request.request_id for request in requests)
        self.most_running = max(self.most_running, len(self._given))
        self.asked += requests
        asked = {request.request_id: request for request in requests}
        try:
            async with aclosing(self.inner.generate(requests)) as answers:
                async for generation in answers:
                    if isinstance(generation, GenerationProgress):
                        yield generation
                        continue
                    at = asyncio.get_running_loop().time()
                    self.answered.append(Answered(at, asked[generation.request_id], generation))
                    self._given.discard(generation.request_id)
                    yield generation
        finally:
            self._given.difference_update(request.request_id for request in requests)

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Loads weights, and remembers the checksum."""
        held = await self.inner.load_weights(policy, version)
        self.loads.append((asyncio.get_running_loop().time(), policy, version, held))
        return held


Batches = dict[str, list[SampleId]]
"""Sample ids by micro-batch."""


class WatchedCache(ModelledCache):
    """A gradient cache that remembers which samples it holds, across checkpoints."""

    def __init__(self, policy: PolicyName) -> None:
        super().__init__(policy)
        self.cached: Batches = {}
        """The samples that the cache holds."""
        self.taken: Batches = {}
        """The samples from which the latest update was made."""
        self.open_group_of: dict[SampleId, str] = {}
        """For each sample that was accumulated in an open credit group: that group."""
        self.reused = set[str]()
        """Ids of micro-batches that were added again, with other rows, after all their rows had been dropped."""

    def add(self, batch: MicroBatch, *, duration_s: float) -> LossReport:
        """Adds a micro-batch. An id may come again if all its rows were dropped."""
        if batch.micro_batch_id in self.cached:
            self.reused.add(batch.micro_batch_id)
        self.cached[batch.micro_batch_id] = [sample.turn.sample_id for sample in batch.samples]
        self.open_group_of |= {
            sample.turn.sample_id: sample.open_group for sample in batch.samples if sample.open_group
        }
        return super().add(batch, duration_s=duration_s)

    def close(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes groups, and forgets the samples of dropped ones."""
        dropped = {name for name, line in lines.items() if line is None}
        self.cached = {
            batch: [sample_id for sample_id in ids if self.open_group_of.get(sample_id) not in dropped]
            for batch, ids in self.cached.items()
        }
        return super().close(lines)

    def take(self) -> CachedSums:
        """Returns the sums that the cache holds, and empties it."""
        self.taken = self.cached
        return super().take()

    def clear(self) -> None:
        """Forgets everything that the cache holds."""
        super().clear()
        self.cached = {}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return super().state() | {"cached": self.cached}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        super().load(state)
        self.cached = state["cached"]


class WatchedTrainer(AroundTrainer):
    """A trainer that remembers which samples went into each update."""

    def __init__(self, inner: Any, cache: WatchedCache) -> None:
        """`inner` is a ModelledTrainer with this cache, or a wrapper around one."""
        super().__init__(inner)
        self.cache = cache
        self.base = Version(0)
        """The version with which this life began."""
        self.updates: dict[Version, Batches] = {}
        """The samples that went into each version that this trainer made."""
        self.published: dict[Version, Checksum] = {}

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates, and remembers the samples."""
        update = await self.inner.step(divisors)
        self.updates[update.version] = self.cache.taken
        return update

    async def publish(self, version: Version) -> Checksum:
        """Publishes, and remembers the checksum."""
        checksum = await self.inner.publish(version)
        self.published[version] = checksum
        return checksum

    async def load(self, path: Path) -> Version:
        """Reads the trainer's state from `path`, and remembers its version."""
        self.base = await self.inner.load(path)
        return self.base
