"""Engines, trainers and a store on fakes: they break when told to, and remember what the laws ask of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from flexmarl.errors import EngineError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
from flexmarl.observability.journal import MemoryJournal
from flexmarl.records import (
    CreditLine,
    Divisors,
    EngineUse,
    Generation,
    GenerationRequest,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Version,
)
from flexmarl.simulator.characters import character_renderer
from flexmarl.simulator.costs import TrainerCosts
from flexmarl.simulator.faults import FaultKind
from flexmarl.simulator.faulty import FaultyStore
from flexmarl.simulator.injection import Injection
from flexmarl.testing.agents import Script
from flexmarl.testing.run import ServedEngine
from flexmarl.testing.training import FakeTrainer
from flexmarl.training.interface import UpdateReport


class Killed(BaseException):
    """The process is gone: no handler of errors sees it, as with kill -9."""


class Pulse:
    """Whether the process of one life still lives."""

    def __init__(self) -> None:
        self.over = False

    def stop(self) -> None:
        """From now on nothing that it does leaves a trace."""
        self.over = True

    def check(self) -> None:
        """Raises Killed if it is over."""
        if self.over:
            raise Killed


class MortalJournal(MemoryJournal):
    """A journal that a dead process cannot write to. After the run its clock stands still."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(self._time)
        self._pulse = pulse
        self._last = 0.0

    def event(self, event: str, /, *, because: str = "", **fields: Any) -> None:
        """Writes one line."""
        self._pulse.check()
        super().event(event, because=because, **fields)

    def _time(self) -> float:
        try:
            self._last = asyncio.get_running_loop().time()
        except RuntimeError:  # The run has ended, and somebody tells how.
            return self._last
        return self._last


class SlowStore(FaultyStore):
    """A store that also takes its time, so that its calls overtake one another."""

    def __init__(
        self, store: ExperienceStore, injection: Injection, pulse: Pulse, *, longest_s: float, random: Random
    ) -> None:
        super().__init__(store, injection, pulse.check)
        self._longest_s, self._random = longest_s, random

    async def before(self, *, writes: bool) -> None:
        """Takes up to `longest_s`."""
        if self._longest_s:
            await asyncio.sleep(self._random.uniform(0.0, self._longest_s))
        await super().before(writes=writes)


class BreakableEngine(ServedEngine):
    """A scripted engine that can be broken, and remembers its answers and loads."""

    def __init__(self, name: str, say: Script, objects: ObjectStore, injection: Injection, seconds_per_token: float):
        """`name` is the pool's."""
        self.name = name
        self.answered: list[tuple[float, PolicyName, Generation]] = []
        """When, for which policy, and what."""
        self.loads: list[tuple[float, PolicyName, Version, Checksum]] = []
        """What it held after each load, by its own checksum."""
        self.most_running = 0
        """Requests that it was given and had not answered."""
        self._given = set[str]()
        self._injection = injection
        self._seconds_per_token = seconds_per_token
        self._factor = 1.0
        self._silent = False
        super().__init__(
            say, character_renderer(), objects, seconds_per_token=seconds_per_token, fails=self._reason_to_fail
        )

    def slow(self, factor: float) -> None:
        """Takes so many times as long from now on."""
        self._factor = factor

    def mute(self) -> None:
        """Never answers again, to no call at all."""
        self._silent = True

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Answers, unless it is silent."""
        self._given.update(request.request_id for request in requests)
        self.most_running = max(self.most_running, len(self._given))
        policies = {request.request_id: request.policy for request in requests}
        try:
            await self._until_heard()
            async with aclosing(super().generate(requests)) as answers:  # type: ignore[type-var]
                async for generation in answers:
                    if self._factor > 1.0:
                        tokens = len(generation.response_ids)
                        await asyncio.sleep((self._factor - 1.0) * self._seconds_per_token * tokens)
                    await self._until_heard()
                    policy = policies[generation.request_id]
                    self.answered.append((asyncio.get_running_loop().time(), policy, generation))
                    self._given.discard(generation.request_id)
                    yield generation
        finally:
            self._given.difference_update(request.request_id for request in requests)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests, unless it is silent."""
        await self._until_heard()
        await super().abort(request_ids)

    async def usage(self) -> EngineUse:
        """The load right now."""
        await self._until_heard()
        return await super().usage()

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Loads, unless this load is to fail."""
        await self._until_heard()
        await asyncio.sleep(0.05 * self._factor)
        fault = self._injection.occurs(FaultKind.FAILED_PUBLISH, self.name)
        if fault and fault.how == "refused":
            raise EngineError(f"{self.name} refused to load version {version}, as planned")
        held = await super().load_weights(policy, version, key)
        held = Checksum("other bytes") if fault else held
        self.loads.append((asyncio.get_running_loop().time(), policy, version, held))
        return held

    async def close(self) -> None:
        """Ends what runs, unless it is silent."""
        await self._until_heard()
        await super().close()

    async def _until_heard(self) -> None:
        if self._silent:
            await asyncio.Event().wait()

    def _reason_to_fail(self, request: GenerationRequest) -> str:
        planned = self._injection.stricken(FaultKind.ENGINE_ERRORS, request.policy)
        return "it could not be served, as planned" if planned else ""


Batches = dict[str, list[SampleId]]
"""Sample ids by micro-batch."""


class BreakableTrainer(FakeTrainer):
    """A trainer that can be broken, and remembers which samples went into each update, across checkpoints."""

    def __init__(self, policy: PolicyName, objects: ObjectStore, injection: Injection, *, sample_s: float) -> None:
        costs = TrainerCosts(sample_s=sample_s, update_s=0.05, publish_s=0.02, resume_s=0.3, suspend_s=0.2)
        super().__init__(policy, objects, costs=costs)
        self.base = Version(0)
        """The version that this life began with."""
        self.updates: dict[Version, Batches] = {}
        """What each version that it made was made of."""
        self.published: dict[Version, Checksum] = {}
        self._cached: Batches = {}
        self.open_group_of: dict[SampleId, str] = {}
        """The open credit group that a sample was accumulated in."""
        self.reused = set[str]()
        """Ids of micro-batches all of whose rows were dropped, under which other rows were accumulated then."""
        self._injection = injection
        self._skew_s = 0.0

    async def _accumulate(self, batch: MicroBatch) -> LossReport:
        """Accumulates, unless it dies meanwhile."""
        if fault := self._injection.occurs(FaultKind.CLOCK_SKEW, self.policy):
            self._skew_s = fault.amount
        if self._injection.occurs(FaultKind.LOST_TRAINER, self.policy):
            half_s = self.costs.sample_s * len(batch.samples) / 2
            asyncio.get_running_loop().call_later(half_s, self.fail, "as planned")
            await asyncio.sleep(half_s)
        known = batch.micro_batch_id in self._reports
        report = await super()._accumulate(batch)
        if not known:  # Else nothing was added. An id whose rows were all dropped is known no longer.
            if batch.micro_batch_id in self._cached:
                self.reused.add(batch.micro_batch_id)
            self._cached[batch.micro_batch_id] = [sample.turn.sample_id for sample in batch.samples]
        self.open_group_of |= {
            sample.turn.sample_id: sample.open_group for sample in batch.samples if sample.open_group
        }
        if self._injection.occurs(FaultKind.LOST_CACHE, self.policy):
            self.lose_cache()
            self._cached = {}
        return replace(report, duration_s=report.duration_s + self._skew_s)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes, and forgets the samples of what is dropped."""
        closed = await super().close_groups(lines)
        dropped = {name for name, line in lines.items() if line is None}
        self._cached = {
            batch: [sample_id for sample_id in ids if self.open_group_of.get(sample_id) not in dropped]
            for batch, ids in self._cached.items()
        }
        return closed

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates, and remembers from what."""
        update = await super().step(divisors)
        self.updates[update.version], self._cached = self._cached, {}
        return update

    async def publish(self, version: Version) -> tuple[ObjectKey, Checksum]:
        """Publishes, and remembers what."""
        key, checksum = await super().publish(version)
        self.published[version] = checksum
        return key, checksum

    async def save(self, path: Path) -> None:
        """Writes its state, and what its gradient cache holds."""
        await super().save(path)
        (path / "cached.json").write_text(json.dumps(self._cached))

    async def load(self, path: Path) -> Version:
        """Reads its state, and what its gradient cache holds."""
        self.base = await super().load(path)
        self._cached = json.loads((path / "cached.json").read_text())
        return self.base
