"""Instances and calls, as the pool sees them.

`Instance`             one engine, the weights that it holds, and the tasks that wait for it
`Call`                 one request on its way to its answer
`Line`                 the calls of a policy that no instance has yet
`rest_of`, `joined`    decide how a request continues at another instance, and join the parts of its answer
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.serving_events import Called
from flexmarl.inference.interface import FIRST_VERSION, EngineCapabilities, InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum
from flexmarl.records import Generation, GenerationRequest, InstanceId, IntArray, Version, VersionRun, WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A published version that every instance of the policy must hold. Without `expected`, no checksum is compared."""

    version: Version
    expected: Checksum | None


@dataclass(slots=True, eq=False)
class Instance:
    """One inference replica of a policy, and the tasks that wait for it."""

    name: InstanceId
    engine: InferenceEngine
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Capabilities of its engine, after the pool has asked for them."""
    version: Version = FIRST_VERSION
    """The newest version that it has acknowledged."""
    holds: Weights | None = None
    """The weights that it loaded last; None before its first load."""
    checksum: Checksum | None = None
    """The checksum that its engine returned for `holds`."""
    loading: asyncio.Future[None] | None = None
    """Its latest load of a publication while it was live, running or done; None before the first one."""
    tasks: set[asyncio.Future[None]] = field(default_factory=set)
    """Tasks that wait for it. They are cancelled when it is lost."""
    running: dict[str, float] = field(default_factory=dict)
    """The requests that it was given and has not answered: by id, when it was given them, in the event loop's time."""
    hands_over: bool = False
    """True if its aborted requests continue at another instance."""
    lost: bool = False
    grown: bool = False
    """True if it is one of those that the run has beyond the configured ones."""

    @property
    def weighted(self) -> WeightedEngine:
        """The engine, for a call that its capabilities allow."""
        return cast(WeightedEngine, self.engine)

    def watch(self, task: asyncio.Future[None]) -> None:
        """Adds a task that waits for this instance, until it is done."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def acknowledged(self, answer: Generation) -> None:
        """Returns when the instance has acknowledged the newest version in its answer (law 10).

        An answer can arrive before the acknowledgement of a load. Raises EngineError if no load acknowledges it.
        """
        newest = max(run.version for run in answer.versions)
        if newest > self.version and self.loading is not None:
            await asyncio.wait([self.loading])
        if newest > self.version:
            raise EngineError(f"it answered with version {newest}, but has acknowledged {self.version}")


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way, and the future that its caller waits for. Times are the event loop's."""

    request: GenerationRequest
    """The request for the tokens that are still missing; after a move, shorter than the caller's request."""
    number: int
    """Place in the line: lower numbers are served first. Unique in the pool."""
    answer: asyncio.Future[Generation]
    asked_at: float
    """Time at which the call first entered the line."""
    instance: Instance | None = None
    """The instance that was given the request; None while the call waits in the line."""
    sent_at: float = 0.0
    """Time at which `instance` was given the request."""
    over: bool = False
    """True if the caller wants no more tokens than those already sampled: it gave up, or ran out of time."""
    waits: bool = False
    """True while the call is in the line."""
    part: Generation | None = None
    """Tokens that earlier instances sampled for the answer."""
    on_tokens: Callable[[IntArray], None] | None = None
    """Gets the tokens of the answer as they are sampled, but for those of its end."""
    streamed: list[Generation] = field(default_factory=list)
    """Parts of its answer that `instance` has streamed so far."""

    def stream(self, part: Generation) -> None:
        """Adds tokens that were sampled to those that the caller has heard. From now on they stay."""
        if self.on_tokens is not None and not self.answer.done():
            self.streamed.append(part)
            self.on_tokens(part.response_ids)

    def end(self, generation: Generation) -> None:
        """Gives the caller the whole answer: earlier parts, then `generation`. Ignored if the answer is done."""
        if not self.answer.done():
            self.answer.set_result(self.whole(generation))

    def keep(self, part: Generation) -> None:
        """Keeps a part of the answer: the request then asks another instance for the rest."""
        heard = sum(len(one.response_ids) for one in self.streamed)
        if self.on_tokens is not None and heard < len(part.response_ids):
            self.on_tokens(part.response_ids[heard:])
        self.streamed.clear()
        self.request = rest_of(self.request, part)
        self.part = self.whole(part)

    def keep_streamed(self) -> None:
        """Keeps what was streamed of an answer whose instance is lost."""
        if self.streamed:
            self.keep(joined(*self.streamed))

    def whole(self, generation: Generation) -> Generation:
        """Earlier parts of the answer, joined with `generation`."""
        return generation if self.part is None else joined(self.part, generation)

    def answered(self, generation: Generation, events: Events) -> Called:
        """Makes the event of the call's answer. Its instance has answered just now."""
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
            purpose=self.request.purpose,
        )


class Line:
    """Calls of one policy that wait for an instance, first come first served. A call that returns keeps its place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Call]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, call: Call) -> None:
        """Adds a call at the place of its number."""
        call.instance, call.waits = None, True
        self._size += 1
        heapq.heappush(self._heap, (call.number, call))

    def take(self) -> Call:
        """Removes and returns the first call. Raises IndexError if the line is empty."""
        while True:
            call = heapq.heappop(self._heap)[1]
            if call.waits:
                self.leave(call)
                return call

    def leave(self, call: Call) -> None:
        """Removes a call. Ignored if it is not in the line."""
        if call.waits:
            call.waits = False
            self._size -= 1


def rest_of(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """The request that continues after `part`: its prompt ends with the tokens of `part`, its budget is smaller.

    If `request` asked after [1, 2] and `part` answered [7], the rest has the prompt [1, 2, 7].
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


def joined(*parts: Generation) -> Generation:
    """Joins the parts of an answer: tokens and version runs of all, finish reason of the last."""
    full, last = [part for part in parts if len(part.response_ids)], parts[-1]
    if (len(full) == 1 and full[0] is last) or not full:
        return last
    runs: list[VersionRun] = []
    sampled = 0
    for part in full:
        for run in part.versions:
            if not runs or run.version != runs[-1].version:
                runs.append(VersionRun(sampled + run.start, run.version))
        sampled += len(part.response_ids)
    return replace(
        last,
        response_ids=np.concatenate([part.response_ids for part in full]),
        logprobs=np.concatenate([part.logprobs for part in full]),
        raw_logprobs=np.concatenate([part.raw_logprobs for part in full]),
        versions=tuple(runs),
        reused_tokens=full[0].reused_tokens,
    )
