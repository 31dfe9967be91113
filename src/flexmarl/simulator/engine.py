"""Engine of the simulated world: answers come from a responder, and take what the costs say, in virtual time.

generate ──► on the way (call_s) ──► waiting ──► batch (slots) ──► each call's answers
                                                   │ one timer: when the next request ends
                                       replies.py says what, decoding.py says when
"""

import asyncio
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.errors import EngineError, boundary
from flexmarl.inference.backends.embedded.prefixes import KeptPrefixes
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, checksum
from flexmarl.records import (
    EngineUse,
    FinishReason,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    PolicyName,
    Version,
    VersionRun,
    unserved,
)
from flexmarl.simulator.costs import EngineCosts
from flexmarl.simulator.decoding import Batch, Place
from flexmarl.simulator.host import Host
from flexmarl.simulator.replies import Responder, reply_to

_Answers = asyncio.Queue[Generation | EngineError]


@dataclass(slots=True, eq=False)
class _Call:
    """A request, from its arrival to its answer."""

    request: GenerationRequest
    ids: IntArray
    """What it will have said at its end."""
    finish: FinishReason
    answers: _Answers
    place: Place["_Call"] | None = None
    """In the batch."""
    reused: int = 0
    over: bool = False
    """Answered, or nobody waits for it."""


class SimulatedEngine:
    """A `WeightedEngine` whose time is modelled and whose weights are only a checksum. For virtual time."""

    def __init__(
        self,
        policy: PolicyName,
        costs: EngineCosts,
        *,
        respond: Responder,
        objects: ObjectStore,
        host: Host | None = None,
        version: Version = FIRST_VERSION,
        costs_of: Callable[[PolicyName], EngineCosts] | None = None,
    ) -> None:
        """`costs_of` gives its costs once it is moved to another policy; without it they stay."""
        self.policy, self.version = policy, version
        self._respond, self._objects = respond, objects
        self._host = host or Host()
        self._costs_of = costs_of or (lambda _: costs)
        self._batch: Batch[_Call] = Batch(costs)
        self._calls: dict[str, _Call] = {}
        self._waiting: OrderedDict[str, _Call] = OrderedDict()
        self._kept = _prefix_memory(costs)
        self._loads: list[tuple[int, Version]] = [(0, version)]
        """From this step of the batch on, tokens are of this version."""
        self._timer: asyncio.TimerHandle | None = None
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self.answered_tokens = 0
        """Sampled in all its answers."""
        self._slow = 1.0
        self._asleep = False
        self._mute: asyncio.Event | None = None
        """Set when a mute engine is gone for good."""
        self._gone = self._refuses = ""

    @property
    def costs(self) -> EngineCosts:
        """What it takes now."""
        return self._batch.costs

    @property
    def busy_s(self) -> float:
        """Seconds in which it had a request to work on."""
        return self._busy_s + (_now() - self._busy_since if self._busy_since is not None else 0.0)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        await self._reached()
        answers: _Answers = asyncio.Queue()
        calls = {request.request_id: call for request in requests if (call := self._take(request, answers))}
        if calls and self.costs.call_s:
            asyncio.get_running_loop().call_later(self.costs.call_s, self._arrive, calls)
        elif calls:
            self._arrive(calls)
        try:
            for _ in requests:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    raise EngineError(str(answer)) from answer
                yield answer
        finally:
            self._end([call for call in calls.values() if not call.over], heard=False)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests at the next token boundary; a mute engine does not hear it."""
        if self._mute is None:
            self._end([call for request_id in request_ids if (call := self._calls.get(request_id))])

    async def usage(self) -> EngineUse:
        """The load right now."""
        await self._reached()
        sampled = self._sampled()
        return EngineUse(
            queued=len(self._calls) - len(sampled),
            running=len(sampled),
            queued_tokens=sum(call.request.sampling.max_tokens for call in self._calls.values()) - sum(sampled),
            generated_tokens=self.answered_tokens + sum(sampled),
            tokens_per_s=len(self._batch) / self._batch.step_s if self._batch.step_s else 0.0,
            version=self.version,
        )

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Serves these weights after `load_s`, or `move_s` if they are another policy's; decoding goes on meanwhile.

        What still runs for the old policy when it moves ends with finish `abort`.
        """
        await self._reached()
        costs, moves = (self.costs, False) if policy == self.policy else (self._costs_of(policy), True)
        await asyncio.sleep(costs.move_s if moves else costs.load_s)
        await self._reached()
        if self._refuses:
            raise EngineError(self._refuses)
        with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
            held = checksum(await self._objects.get(key))
        self._batch.settle(_now())
        if moves:
            self._end(list(self._calls.values()))
            self.policy, self._batch.costs, self._kept = policy, costs, _prefix_memory(costs)
        self._loads = [*(self._loads if self._calls else ()), (self._batch.steps, version)]
        self.version = version
        self._kept.clear()
        self._go_on()
        return held

    async def sleep(self) -> None:
        """Stands still until `wake`, with the requests that it has; the step under way is its last."""
        await self._reached()
        if not self._asleep:
            self._batch.stop(_now())
            self._asleep = True
            self._answer_ended()
            self._go_on()
            await asyncio.sleep(self.costs.sleep_s)

    async def wake(self) -> None:
        """Goes on; one that is awake is no error."""
        await self._reached()
        if self._asleep:
            await asyncio.sleep(self.costs.wake_s)
            self._asleep = False
            self._batch.resume(_now())
            self._go_on()

    async def close(self) -> None:
        """Ends what runs with finish `abort`."""
        if not self._gone:
            for call in list(self._calls.values()):
                self._answer(call, FinishReason.ABORT)
            self._lose(f"the engine of '{self.policy}' is closed")

    def fail(self, because: str) -> None:
        """Loses the engine: what runs, and every later call, raises EngineError."""
        answers = dict.fromkeys(call.answers for call in self._calls.values())
        self._lose(because)
        for queue in answers:
            queue.put_nowait(EngineError(because))

    def slow(self, factor: float) -> None:
        """From the next token boundary on, everything takes so many times what the costs say."""
        self._slow = factor
        self._set_speed()

    def mute(self) -> None:
        """Never answers again, until it is closed or fails."""
        self._mute = asyncio.Event()
        self._stand_still()

    def refuse_load(self, because: str) -> None:
        """From now on, no weights can be loaded; "" ends it."""
        self._refuses = because

    async def _reached(self) -> None:
        """Returns if the engine is there; a call to a mute one waits until it is gone."""
        if self._mute is not None:
            await self._mute.wait()
        if self._gone:
            raise EngineError(self._gone)

    def _take(self, request: GenerationRequest, answers: _Answers) -> _Call | None:
        """The call of a request; None if it cannot be served, which it is told at once."""
        problem = self._problem(request)
        if not problem:
            try:
                ids, finish = reply_to(request, self._respond)
                call = self._calls[request.request_id] = _Call(request, ids, finish, answers)
                return call
            except EngineError as error:
                problem = str(error)
        answers.put_nowait(unserved(request, self.version, FinishReason.ERROR, problem))
        return None

    def _problem(self, request: GenerationRequest) -> str:
        if request.policy != self.policy:
            return f"this engine serves policy '{self.policy}', not '{request.policy}'"
        if request.request_id in self._calls:
            return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
        if not len(request.prompt_ids):
            return "the prompt must have at least 1 token, got none"
        if request.sampling.max_tokens < 1:
            return f"sampling.max_tokens must be at least 1, got {request.sampling.max_tokens}"
        return ""

    def _arrive(self, calls: Mapping[str, _Call]) -> None:
        self._waiting.update((name, call) for name, call in calls.items() if not call.over)
        self._go_on()

    def _go_on(self) -> None:
        """After anything that has happened: requests join, and the timer is set for the next one that ends."""
        if self._gone or self._mute is not None:
            return
        self._note_work()
        if not self._asleep and self._waiting and len(self._batch) < self.costs.slots:
            self._admit()
        self._set_timer()

    def _admit(self) -> None:
        batch = self._batch
        batch.settle(_now())
        # Who ends with the step under way is answered first: a prefill now would delay its answer.
        while self._waiting and len(batch) < self.costs.slots and not batch.ending:
            _, call = self._waiting.popitem(last=False)
            prompt = call.request.prompt_ids
            found = self._kept.find(call.request.conversation, prompt)
            call.reused = found[1] if found else 0
            call.place = batch.join(
                call, tokens=len(call.ids), prompt_tokens=len(prompt), prefill_tokens=len(prompt) - call.reused
            )

    def _set_timer(self) -> None:
        when = self._batch.next_end
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._on_time) if when < math.inf else None

    def _on_time(self) -> None:
        self._timer = None
        self._batch.go_to_next_end()
        self._answer_ended()
        self._go_on()

    def _answer_ended(self) -> None:
        for place in self._batch.pop_ended():
            self._answer(place.item, place.item.finish)

    def _end(self, calls: Sequence[_Call], *, heard: bool = True) -> None:
        """Ends calls: those that wait or sleep at once, those that decode at the next token boundary."""
        self._batch.settle(_now())
        for call in calls:
            if not heard:
                self._forget(call)
            if call.place is None:
                self._waiting.pop(call.request.request_id, None)
                self._answer(call, FinishReason.ABORT)
            elif self._batch.end_now(call.place):
                call.finish = FinishReason.ABORT
        if self._asleep:
            self._answer_ended()
        if calls:
            self._go_on()

    def _answer(self, call: _Call, finish: FinishReason) -> None:
        place, ids = call.place, call.ids
        if finish is FinishReason.ABORT:
            ids = ids[: place.sampled_at(self._batch.steps)] if place else ids[:0]
        versions = self._versions(place, len(ids)) if place else (VersionRun(0, self.version),)
        logprobs = _logprobs(len(ids))
        self._forget(call)
        self.answered_tokens += len(ids)
        if self.costs.prefill_token_s and call.request.conversation is not None and len(versions) == 1:
            self._kept.keep(call.request.conversation, np.concatenate((call.request.prompt_ids, ids[:-1])))
        call.answers.put_nowait(
            Generation(
                request_id=call.request.request_id,
                response_ids=ids,
                logprobs=logprobs,
                raw_logprobs=logprobs,
                versions=versions,
                finish=finish,
                reused_tokens=call.reused,
            )
        )

    def _forget(self, call: _Call) -> None:
        """Its id may be used again: it is answered, or nobody waits for it."""
        call.over = True
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]

    def _versions(self, place: Place[_Call], num_tokens: int) -> tuple[VersionRun, ...]:
        """The loads since its first token are the borders of its version runs."""
        if place.first >= self._loads[-1][0]:
            return (VersionRun(0, self._loads[-1][1]),)
        began = bisect_right(self._loads, place.first, key=lambda load: load[0]) - 1
        later = ((math.ceil(step - place.first), version) for step, version in self._loads[began + 1 :])
        return (
            VersionRun(0, self._loads[began][1]),
            *(VersionRun(start, version) for start, version in later if start < num_tokens),
        )

    def _sampled(self) -> list[int]:
        """Tokens of each request in the batch, the step under way included."""
        steps = self._batch.steps_at(_now())
        return [call.place.sampled_at(steps) for call in self._calls.values() if call.place]

    def _note_work(self) -> None:
        """Tells the host when work begins and ends, and counts the seconds between."""
        busy = bool(len(self._batch) or self._waiting) and not self._asleep
        if busy and self._busy_since is None:
            self._busy_since = _now()
            self._host.engine_busy(self._set_speed)
            self._set_speed()
        elif not busy:
            self._rest()

    def _rest(self) -> None:
        if self._busy_since is not None:
            self._busy_s += _now() - self._busy_since
            self._busy_since = None
            self._host.engine_idle(self._set_speed)

    def _set_speed(self) -> None:
        self._batch.settle(_now())
        self._batch.slowness = self._slow * self._host.engine_factor()
        self._set_timer()

    def _stand_still(self) -> None:
        """Nothing will happen here any more."""
        self._rest()
        self._batch.stop(_now())
        self._set_timer()

    def _lose(self, because: str) -> None:
        self._gone = because
        self._stand_still()
        for call in list(self._calls.values()):
            self._forget(call)
        if self._mute is not None:
            self._mute.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _prefix_memory(costs: EngineCosts) -> KeptPrefixes:
    """What it remembers of past prompts; nothing where prompts are free."""
    return KeptPrefixes(range(costs.kept_prefixes if costs.prefill_token_s else 0))


def _logprobs(num_tokens: int) -> FloatArray:
    """[num_tokens] -1 everywhere: a view of one array, since a simulation answers a hundred thousand calls."""
    return _MINUS_ONE[:num_tokens] if num_tokens <= len(_MINUS_ONE) else np.full(num_tokens, -1.0, np.float32)


_MINUS_ONE: FloatArray = np.full(1 << 16, -1.0, np.float32)
_MINUS_ONE.flags.writeable = False
