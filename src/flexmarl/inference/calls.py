"""One instance, as the pool sees it: its engine, what that holds, and who waits for it.

Calls of the pool, from request to answer, and the line in which those wait that no instance has yet.

Decides how a request goes on at another instance, and what its caller gets of the parts.
"""

import asyncio
import heapq
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.events.hub import Events
from flexmarl.events.serving_events import Called
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.interface import EngineCapabilities, InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Generation, GenerationRequest, InstanceId, Version, VersionRun, WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What every instance must hold."""

    version: Version
    key: ObjectKey
    expected: Checksum | None


@dataclass(slots=True, eq=False)
class Instance:
    """One replica, and the tasks that wait for it."""

    name: InstanceId
    engine: InferenceEngine
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Its engine's, once the pool has asked it."""
    version: Version = FIRST_VERSION
    """The newest that it has acknowledged."""
    holds: Weights | None = None
    checksum: Checksum | None = None
    """Its own, of what it holds."""
    loading: asyncio.Future[None] | None = None
    tasks: set[asyncio.Future[None]] = field(default_factory=set)
    """Cancelled when it is lost."""
    running: set[str] = field(default_factory=set)
    """Ids of the requests that it was given and has not answered."""
    hands_over: bool = False
    """Its requests go on elsewhere, as soon as they have ended here."""
    lost: bool = False

    @property
    def weighted(self) -> WeightedEngine:
        """The engine, for a call that its capabilities allow."""
        return cast(WeightedEngine, self.engine)

    def watch(self, task: asyncio.Future[None]) -> None:
        """The task waits for this instance."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def acknowledged(self, answer: Generation) -> None:
        """Returns when the instance has acknowledged the version of its answer (law 10).

        An answer can overtake the acknowledgement of a load. Raises EngineError if there is no such load.
        """
        newest = max(run.version for run in answer.versions)
        if newest > self.version and self.loading is not None:
            await asyncio.wait([self.loading])
        if newest > self.version:
            raise EngineError(f"it answered with version {newest}, but has acknowledged {self.version}")


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way, and who waits for it."""

    request: GenerationRequest
    """What is left to ask: of a call that was moved, less than its caller asked."""
    number: int
    """Its place in the line; no other call of the pool has it."""
    answer: asyncio.Future[Generation]
    asked_at: float
    """When it lined up first."""
    instance: Instance | None = None
    """None while it waits for one."""
    sent_at: float = 0.0
    over: bool = False
    """Nobody waits for more than what there is of it."""
    waits: bool = False
    part: Generation | None = None
    """What other instances have sampled of the answer."""

    def end(self, generation: Generation) -> None:
        """Hands the answer, with the earlier parts, to the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(self.whole(generation))

    def keep(self, part: Generation) -> None:
        """Goes on after this part, at another instance."""
        self.request = rest_of(self.request, part)
        self.part = self.whole(part)

    def whole(self, generation: Generation) -> Generation:
        """The answer with the earlier parts."""
        return generation if self.part is None else joined(self.part, generation)

    def answered(self, generation: Generation, events: Events) -> Called:
        """The event of its answer, now and at its instance."""
        assert self.instance is not None
        whole = self.whole(generation)
        kept = 0 if self.part is None else len(self.part.response_ids)
        return Called(
            process=WorkerId.engine(self.instance.name),
            began=events.moment(self.sent_at),
            policy=self.request.policy,
            request=self.request.request_id,
            waited_s=round(self.sent_at - self.asked_at, 6) if self.part is None else 0.0,
            prompt_tokens=len(self.request.prompt_ids) - kept,
            sampled_tokens=len(whole.response_ids),
            kept_tokens=kept,
            reused_tokens=generation.reused_tokens,
            version=whole.versions[0].version,
            finish=whole.finish,
        )


class Line:
    """Calls of one policy that wait for an instance, first come first served; one that comes back keeps its place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Call]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, call: Call) -> None:
        """Lines up."""
        call.instance, call.waits = None, True
        self._size += 1
        heapq.heappush(self._heap, (call.number, call))

    def take(self) -> Call:
        """The first in line. Raises IndexError if there is none."""
        while True:
            call = heapq.heappop(self._heap)[1]
            if call.waits:
                self.leave(call)
                return call

    def leave(self, call: Call) -> None:
        """Goes away without having been served; who is not in line is no error."""
        if call.waits:
            call.waits = False
            self._size -= 1


def rest_of(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """What is left to ask after `part`: the same call, its prompt longer by what was sampled, its budget smaller.

    >>> rest_of(request, part).prompt_ids      # request asked after [1, 2], part answered [7]
    array([1, 2, 7], dtype=int32)
    """
    sampled = len(part.response_ids)
    if not sampled:
        return request
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, part.response_ids]),
        offset=request.offset + sampled,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - sampled),
    )


def joined(part: Generation, rest: Generation) -> Generation:
    """One answer of two: the tokens of both, the end of the second, and the versions that sampled each."""
    sampled = len(part.response_ids)
    if not sampled:
        return rest
    runs = list(part.versions)
    for run in rest.versions if len(rest.response_ids) else ():
        if run.version != runs[-1].version:
            runs.append(VersionRun(sampled + run.start, run.version))
    return replace(
        rest,
        response_ids=np.concatenate([part.response_ids, rest.response_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        raw_logprobs=np.concatenate([part.raw_logprobs, rest.raw_logprobs]),
        versions=tuple(runs),
        reused_tokens=part.reused_tokens,
    )
