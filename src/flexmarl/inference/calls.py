"""Runs the calls of one policy on its instances.

    call --> line --> router --> instance --> answer
              ^                     |
              '--- unfinished ------'  the instance is lost, or moved

`Instance`             one engine, the weights that it holds, and the tasks that wait for it
`Call`                 one request on its way to its answer
`Line`                 the calls of a policy that no instance has yet
`rest_of`, `joined`    decide how a request continues at another instance, and join the parts of its answer

consumes:     calls, and answers
waits for:    an instance with a free place
produces:     one answer per call
unblocked by: an answer, a new instance, or the end of the last one that could come
"""

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.serving_events import Called
from flexmarl.inference.instances import Instances, Start
from flexmarl.inference.interface import FIRST_VERSION, EngineCapabilities, InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import (
    FinishReason,
    Generation,
    GenerationRequest,
    InstanceId,
    Version,
    VersionRun,
    WorkerId,
    unserved,
)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A published version that every instance of the policy must hold. Without `expected`, no checksum is compared."""

    version: Version
    key: ObjectKey
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
    running: set[str] = field(default_factory=set)
    """Ids of the requests that it was given and has not answered."""
    hands_over: bool = False
    """True if its aborted requests continue at another instance."""
    lost: bool = False

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

    def end(self, generation: Generation) -> None:
        """Gives the caller the whole answer: earlier parts, then `generation`. Ignored if the answer is done."""
        if not self.answer.done():
            self.answer.set_result(self.whole(generation))

    def keep(self, part: Generation) -> None:
        """Keeps a part of the answer: the request then asks another instance for the rest."""
        self.request = rest_of(self.request, part)
        self.part = self.whole(part)

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
    """Joins two parts of an answer: tokens and version runs of both, finish reason of the second."""
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


NOT_OPEN = "the pool is not open; requests need `async with pool.open():` around them"


class Dispatch:
    """Gives the calls of one policy to its instances, and reads the answers."""

    def __init__(self, instances: Instances, *, start: Start, awake: asyncio.Event, events: Events) -> None:
        """No call is given to an instance while `awake` is not set."""
        self.line = Line()
        self._instances = instances
        self._start = start
        self._awake = awake
        self._events = events
        self._due = False
        self._closed = False

    def add(self, call: Call) -> None:
        """Adds a call to the line. Calls that are added in one tick of the event loop are given out together."""
        self.line.add(call)
        self.give_out_soon()

    def give_out_soon(self) -> None:
        """Gives out waiting calls at the next tick of the event loop. Called when instances or places have changed."""
        if len(self.line) and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._give_out)

    def close(self) -> None:
        """Refuses all calls that wait, and those that an instance returns from now on."""
        self._closed = True
        self.give_out_soon()

    async def abort(self, call: Call) -> None:
        """Asks the call's instance to end it. A call that no instance has ends at once."""
        instance = call.instance
        if instance is None or instance.lost:
            self.line.leave(call)
            call.end(self.unserved(call))
            return
        try:
            await instance.engine.abort([call.request.request_id])
        except EngineError as error:
            self._instances.lose(instance.name, f"aborting failed: {error}")

    def unserved(self, call: Call) -> Generation:
        """An answer without tokens and with finish `abort`, for a call whose instance is missing or does not answer."""
        instance = call.instance
        version = FIRST_VERSION if instance is None or instance.lost else instance.version
        return unserved(call.request, version, FinishReason.ABORT)

    def _give_out(self) -> None:
        self._due = False
        if self._closed or (not self._instances.live and not self._instances.expected):
            self._refuse()
        elif self._awake.is_set():
            self._place()

    def _place(self) -> None:
        """Gives waiting calls to instances with free places: to each instance all its calls in one `generate`."""
        shares: dict[InstanceId, list[Call]] = defaultdict(list)
        now, router = asyncio.get_running_loop().time(), self._instances.router
        while len(self.line) and router.has_place:
            call = self.line.take()
            if call.over:
                call.end(self.unserved(call))
            if not call.answer.done():
                name = router.place(call.request.sampling.max_tokens, call.request.conversation).instance
                call.instance, call.sent_at = self._instances.live[name], now
                shares[name].append(call)
        for name, share in shares.items():
            instance = self._instances.live[name]
            instance.running.update(call.request.request_id for call in share)
            undone = {call.request.request_id: call for call in share}
            reading = self._start(self._read(instance, undone), f"read-{name}")
            # Not in the task itself: a task that is cancelled before it begins would never return its calls.
            reading.add_done_callback(lambda _, undone=undone: self._take_back(undone))
            instance.watch(reading)

    def _refuse(self) -> None:
        """Ends all waiting calls, because no instance will serve them."""
        nobody = f"no instance of '{self._instances.policy}' is left: {self._instances.reasons}"
        while len(self.line):
            call = self.line.take()
            because = NOT_OPEN if self._closed else nobody
            if call.over:
                call.end(self.unserved(call))
            elif call.part is not None:  # The caller gets the tokens sampled so far, and accounts for them.
                call.end(unserved(call.request, FIRST_VERSION, FinishReason.ERROR, because))
            elif not call.answer.done():
                call.answer.set_exception(EngineError(because))

    async def _read(self, instance: Instance, undone: dict[str, Call]) -> None:
        """Reads the answers of one instance to `undone`, from which answered calls are removed."""
        try:
            if not instance.hands_over:
                async for generation in instance.engine.generate([call.request for call in undone.values()]):
                    await instance.acknowledged(generation)
                    self._answered(undone.pop(generation.request_id), generation)
                if undone:
                    self._instances.lose(instance.name, f"it left {len(undone)} requests without an answer")
        except Exception as error:
            # Any error of an engine costs the engine, not the run.
            self._instances.lose(instance.name, f"{type(error).__name__}: {error}")

    def _take_back(self, undone: Mapping[str, Call]) -> None:
        """Puts the calls that an instance did not answer back into the line."""
        for call in undone.values():
            self._freed(call)
            self.add(call)

    def _answered(self, call: Call, generation: Generation) -> None:
        """Ends a call with its answer, or keeps the answer as a part if the call continues at another instance."""
        instance = self._freed(call)
        wanted = not call.over and not call.answer.done()
        if instance.hands_over and generation.finish is FinishReason.ABORT and wanted:
            call.keep(generation)
            self.add(call)
        else:
            call.end(generation)
            self._events.emit(call.answered(generation, self._events))

    def _freed(self, call: Call) -> Instance:
        """Frees the call's place at its instance, for calls that wait. Returns the instance."""
        assert call.instance is not None
        call.instance.running.discard(call.request.request_id)
        self._instances.router.finish(call.instance.name, call.request.sampling.max_tokens)
        self.give_out_soon()
        return call.instance
