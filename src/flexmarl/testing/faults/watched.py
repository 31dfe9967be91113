"""Wrappers around engines, trainers and events that remember what the laws check, and the witnesses of faults.

A witness is a later event in the journal that shows how the system reacted to a fault that struck.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from flexmarl.events.event import Event
from flexmarl.events.group_events import GroupExpired, GroupFailed, GroupFiltered, GroupRetried
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import (
    CheckpointPassedOver,
    CheckpointRemoved,
    FaultStruck,
    Resumed,
    RunFailed,
    WorkerLost,
)
from flexmarl.events.serving_events import Called, InstanceLost
from flexmarl.events.training_events import MicroBatchDone, Swapped
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import (
    CreditLine,
    Divisors,
    Generation,
    GenerationRequest,
    InstanceId,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Version,
    WorkerId,
)
from flexmarl.simulator.modelled_cache import CachedSums, ModelledCache
from flexmarl.testing.faults.fault_plan import FaultKind
from flexmarl.testing.faults.faulty import Around, AroundTrainer
from flexmarl.testing.faults.schedule import SECONDS_PER_TOKEN
from flexmarl.testing.faults.story import Story
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

    def emit(self, event: Event) -> None:
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

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        self._given.update(request.request_id for request in requests)
        self.most_running = max(self.most_running, len(self._given))
        self.asked += requests
        asked = {request.request_id: request for request in requests}
        try:
            async with aclosing(self.inner.generate(requests)) as answers:
                async for generation in answers:
                    at = asyncio.get_running_loop().time()
                    self.answered.append(Answered(at, asked[generation.request_id], generation))
                    self._given.discard(generation.request_id)
                    yield generation
        finally:
            self._given.difference_update(request.request_id for request in requests)

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Loads weights, and remembers the checksum."""
        held = await self.inner.load_weights(policy, version, key)
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

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Publishes, and remembers the checksum."""
        key, checksum = await self.inner.publish(version)
        self.published[version] = checksum
        return key, checksum

    async def load(self, path: Path) -> Version:
        """Reads the trainer's state from `path`, and remembers its version."""
        self.base = await self.inner.load(path)
        return self.base


Reaction = Callable[[FaultStruck, Event], bool]
"""Rule that returns True if the second event is the system's reaction to the fault in the first."""


def seen(story: Story) -> tuple[Counter[FaultKind], Counter[FaultKind]]:
    """Counts, by kind, the faults that struck, and those to which the system reacted afterwards."""
    return seen_in(story.events)


def seen_in(events: Sequence[Event]) -> tuple[Counter[FaultKind], Counter[FaultKind]]:
    """Counts like `seen`, for the events of a journal."""
    struck, answered = Counter[FaultKind](), Counter[FaultKind]()
    for place, fault in enumerate(events):
        if isinstance(fault, FaultStruck):
            kind = FaultKind(fault.kind)
            struck[kind] += 1
            if any(REACTIONS[kind](fault, event) for event in events[place + 1 :]):
                answered[kind] += 1
    return struck, answered


def combined(story: Story) -> Counter[str]:
    """Counts 1 for each combination of COMBINATIONS that came together in the run."""
    return Counter(name for name, holds in COMBINATIONS.items() if holds(story))


def _losses_while_streaming(story: Story) -> bool:
    """True if trainers had rows of open groups and were swapped, and the run survived a lost trainer and write."""
    streamed = any(trainer.cache.open_group_of for life in story.lives for trainer in life.trainers.values())
    swapped = any(isinstance(event, Swapped) for event in story.events)
    _, answered = seen(story)
    return streamed and swapped and bool(answered[FaultKind.LOST_TRAINER] and answered[FaultKind.STORE_FAILURE])


def _batch_id_reused(story: Story) -> bool:
    """True if all rows of a micro-batch were dropped, and other rows were accumulated under its id."""
    return any(trainer.cache.reused for life in story.lives for trainer in life.trainers.values())


COMBINATIONS: Mapping[str, Callable[[Story], bool]] = {
    "losses_while_streaming": _losses_while_streaming,
    "batch_id_reused": _batch_id_reused,
}
"""Conditions that must meet in one run before some laws can break. They rarely meet by chance."""


def _lost(fault: FaultStruck, event: Event) -> bool:
    """A loss counts if it names the target, or says that it was planned: a move gives an instance another name."""
    mine = isinstance(event, InstanceLost) and event.instance == fault.target
    return mine or (isinstance(event, InstanceLost) and "as planned" in event.because)


def _late(fault: FaultStruck, event: Event) -> bool:
    """A call counts if it took as long as the slowed engine needs, or was aborted."""
    if not isinstance(event, Called) or event.process != WorkerId.engine(InstanceId.parse(fault.target)):
        return "was aborted" in event.because
    slow_s = fault.amount * SECONDS_PER_TOKEN * event.sampled_tokens
    return event.finish == "abort" or event.t - event.began > 0.9 * slow_s > 0


def _node_lost(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, WorkerLost) and event.node == fault.target


def _silent(fault: FaultStruck, event: Event) -> bool:
    return _lost(fault, event) or "was aborted" in event.because


def _erred(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, Called) and event.policy == fault.target and event.finish == "error"


def _resumed(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, Resumed)


def _passed_over(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, CheckpointPassedOver | CheckpointRemoved)


def _misdated(fault: FaultStruck, event: Event) -> bool:
    """A micro-batch counts if its reported duration differs from the skew by less than half the skew."""
    if not isinstance(event, MicroBatchDone) or event.policy != fault.target:
        return False
    return abs(event.duration_s - fault.amount) < abs(fault.amount) / 2


def _timed_out(fault: FaultStruck, event: Event) -> bool:
    late = isinstance(event, GroupExpired) and "held up others" in event.because
    return late or (isinstance(event, GroupRetried | GroupFailed) and "took longer" in event.because)


def _poisoned(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, GroupFailed) and fault.target in event.because


def _filtered(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, GroupFiltered) and "no group's rewards differ" in event.because


def _exhausted(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, RunFailed) and "SourceExhausted" in event.because


REACTIONS: Mapping[FaultKind, Reaction] = {
    FaultKind.LOST_INSTANCE: _lost,
    FaultKind.LOST_NODE: _node_lost,
    FaultKind.SLOW_INSTANCE: _late,
    FaultKind.ENGINE_SILENCE: _silent,
    FaultKind.ENGINE_ERRORS: _erred,
    FaultKind.FAILED_PUBLISH: _lost,
    FaultKind.LOST_TRAINER: _resumed,
    FaultKind.LOST_CACHE: _resumed,
    FaultKind.CLOCK_SKEW: _misdated,
    FaultKind.STORE_FAILURE: _resumed,
    FaultKind.LOST_CONTROLLER: _resumed,
    FaultKind.TORN_CHECKPOINT: _passed_over,
    FaultKind.HUNG_WORKFLOW: _timed_out,
    FaultKind.POISON_TASK: _poisoned,
    FaultKind.ALL_FILTERED: _filtered,
    FaultKind.SOURCE_EXHAUSTED: _exhausted,
}
