"""Engine on a modelled device: a responder gives its answers, and the costs give their time.

generate ──► on the way (call_s) ──► waiting ──► batch (slots) ──► each call's answers
                                                   │ one timer: when the next request ends
                  replies.py decides what is answered, decoding.py when, modelled_calls.py by which version

Simulations, the fault campaign and scripted tests all use this engine, with different costs.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from flexmarl.analysis.costs import EngineCosts
from flexmarl.errors import EngineError, boundary
from flexmarl.inference.interface import FIRST_VERSION, EngineCapabilities
from flexmarl.inference.kv_ledger import Kept, KeptPrefixes
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, checksum, weights_key
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationProgress,
    GenerationRequest,
    PolicyName,
    Version,
    VersionRun,
    unserved,
)
from flexmarl.simulator.decoding import Batch, CpuShare
from flexmarl.simulator.modelled_calls import Answers, Loads, Logprobs, ModelledCall, flat_logprobs, problem_of
from flexmarl.simulator.replies import Responder, reply_to

LOOK_S = 1.0
"""Seconds between two looks at a request that streams, while no step is in progress."""
ALL_CAPABILITIES = EngineCapabilities(
    loads_weights=True, sleeps=True, deterministic=True, continues=True, raw_logprobs=True, adapters=True
)


class ModelledEngine:
    """A `WeightedEngine` whose time is modelled and whose weights are only a checksum. It runs on any event loop."""

    def __init__(
        self,
        costs: EngineCosts,
        respond: Responder,
        *,
        policy: PolicyName | None = None,
        objects: ObjectStore | None = None,
        host: CpuShare | None = None,
        version: Version = FIRST_VERSION,
        costs_of: Callable[[PolicyName], EngineCosts] | None = None,
        logprobs: Logprobs = flat_logprobs,
    ) -> None:
        """`policy` is the policy it serves. With None it serves any policy that a request names, and is never moved.

        `objects` is where `load_weights` finds weights. `costs_of` gives the costs after a move to another policy;
        without it the costs stay the same.
        """
        self.policy, self.version = policy, version
        self._respond, self._objects, self._logprobs = respond, objects, logprobs
        self._host = host or CpuShare()
        self._costs_of = costs_of or (lambda _: costs)
        self._batch: Batch[ModelledCall] = Batch(costs)
        self._calls: dict[str, ModelledCall] = {}
        self._waiting: OrderedDict[str, ModelledCall] = OrderedDict()
        self._kept = _prefix_memory(costs)
        self._prompts: dict[bytes, ModelledCall] = {}
        """The newest call in the batch with each prompt, if prompt tokens take time."""
        self._loads = Loads(version)
        self._timer: asyncio.TimerHandle | None = None
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self.answered_tokens = 0
        """Tokens in all answers so far."""
        self._slow = 1.0
        self._asleep = False
        self._lost = ""
        """The reason why every call raises EngineError; empty while the engine works."""

    @property
    def costs(self) -> EngineCosts:
        """The costs that apply now."""
        return self._batch.costs

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine was awake and had a request to work on."""
        return self._busy_s + (_now() - self._busy_since if self._busy_since is not None else 0.0)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order; progress of those that stream after every step."""
        self._check_alive()
        answers: Answers = asyncio.Queue()
        calls = {request.request_id: call for request in requests if (call := self._take(request, answers))}
        if calls and self.costs.call_s:
            asyncio.get_running_loop().call_later(self.costs.call_s, self._arrive, calls)
        elif calls:
            self._arrive(calls)
        try:
            streamed = dict.fromkeys((name for name, call in calls.items() if call.request.streams), 0)
            left = len(requests)
            while left:
                try:
                    async with asyncio.timeout_at(self._next_news() if streamed else None):
                        answer = await answers.get()
                except TimeoutError:
                    for name in streamed:
                        if progress := self._progress(calls[name], streamed[name]):
                            streamed[name] += len(progress.part.response_ids)
                            yield progress
                    continue
                if isinstance(answer, EngineError):
                    raise EngineError(str(answer)) from answer
                left -= 1
                yield answer
        finally:
            self._end([call for call in calls.values() if not call.over], answered=False)

    def _next_news(self) -> float:
        """When to look for tokens again: after the step in progress, or in a while if there is none."""
        return min(self._batch.next_boundary(_now()), _now() + LOOK_S)

    def _progress(self, call: ModelledCall, streamed: int) -> GenerationProgress | None:
        """The tokens of a call behind the first `streamed`, without its last one; None if there are none."""
        if call.over or call.place is None:
            return None
        number = min(call.place.sampled_at(self._batch.steps_at(_now())), len(call.ids) - 1)
        if number <= streamed:
            return None
        versions = self._loads.runs(call.place.first + streamed, number - streamed)
        logprobs = self._logprobs(call.request, number)[streamed:].copy()
        part = call.generation(call.ids[streamed:number], logprobs, FinishReason.ABORT, versions)
        return GenerationProgress(request_id=call.request.request_id, part=part)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests: waiting ones at once, decoding ones at the next token boundary."""
        self._end([call for request_id in request_ids if (call := self._calls.get(request_id))])

    async def usage(self) -> EngineUse:
        """Returns the current load."""
        self._check_alive()
        sampled = self._sampled()
        return EngineUse(
            queued=len(self._calls) - len(sampled),
            running=len(sampled),
            queued_tokens=sum(call.request.sampling.max_tokens for call in self._calls.values()) - sum(sampled),
            generated_tokens=self.answered_tokens + sum(sampled),
            tokens_per_s=len(self._batch) / self._batch.step_s if self._batch.step_s else 0.0,
            version=self.version,
        )

    async def capabilities(self) -> EngineCapabilities:
        """Returns all capabilities."""
        return ALL_CAPABILITIES

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Serves these weights after `load_s`, or `move_s` if they are another policy's. Decoding continues until then.

        At a move, requests of the old policy that still run end with finish `abort`.
        """
        self._check_alive()
        moves = self.policy not in (None, policy)
        costs = self._costs_of(policy) if moves else self.costs
        await asyncio.sleep((costs.move_s if moves else costs.load_s) * self._slow)
        self._check_alive()
        key = weights_key(policy, version)
        with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
            held = await self.fetch(key)
        self._batch.settle(_now())
        if moves:
            self._end(list(self._calls.values()))
            self.policy, self._batch.costs, self._kept = policy, costs, _prefix_memory(costs)
        if not self._calls:
            self._loads.forget()
        self._loads.add(self._batch.steps, version)
        self.version = version
        self._kept.clear()
        self._prompts.clear()
        self._go_on()
        return held

    async def fetch(self, key: ObjectKey) -> Checksum:
        """Reads weights and returns the engine's own checksum. Subclasses with other weights override it."""
        if self._objects is None:
            raise EngineError(f"this engine was made without `objects`, so it cannot load '{key}'")
        tree = await self._objects.get(key)
        return _digest_of(
            tuple((name, tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in tree.items())
        )

    async def sleep(self) -> None:
        """Pauses after the current step, until `wake`. The engine keeps its requests."""
        self._check_alive()
        if not self._asleep:
            self._batch.stop(_now())
            self._asleep = True
            self._answer_ended()
            self._go_on()
            await asyncio.sleep(self.costs.sleep_s)

    async def wake(self) -> None:
        """Continues. Does nothing if the engine is awake."""
        self._check_alive()
        if self._asleep:
            await asyncio.sleep(self.costs.wake_s)
            self._asleep = False
            self._batch.resume(_now())
            self._go_on()

    async def close(self) -> None:
        """Ends all requests with finish `abort`. Later requests raise EngineError."""
        if not self._lost:
            for call in list(self._calls.values()):
                self._answer(call, FinishReason.ABORT)
            self._lose("the engine is closed" if self.policy is None else f"the engine of '{self.policy}' is closed")

    def fail(self, because: str = "the engine was lost") -> None:
        """Injects a fault: the engine is lost. Running and later requests raise EngineError."""
        answers = dict.fromkeys(call.answers for call in self._calls.values())
        self._lose(because)
        for queue in answers:
            queue.put_nowait(EngineError(because))

    def slow(self, factor: float) -> None:
        """Injects a fault: from the next token boundary on, prefill, decoding and loads take `factor` times as long."""
        self._slow = factor
        self._set_speed()

    def _take(self, request: GenerationRequest, answers: Answers) -> ModelledCall | None:
        """Makes the call of a request. If it cannot be served, queues the reason as its answer and returns None."""
        in_use = request.request_id in self._calls
        problem = problem_of(request, self.policy, in_use=in_use)
        if not problem:
            try:
                ids, finish = reply_to(request, self._respond)
                call = self._calls[request.request_id] = ModelledCall(request, ids, finish, answers)
                return call
            except EngineError as error:
                problem = str(error)
        answers.put_nowait(unserved(request, self.version, FinishReason.ERROR, problem))
        return None

    def _arrive(self, calls: Mapping[str, ModelledCall]) -> None:
        self._waiting.update((name, call) for name, call in calls.items() if not call.over)
        self._go_on()

    def _go_on(self) -> None:
        """Runs after every change: admits waiting requests and sets the timer for the next end."""
        if self._lost:
            return
        self._record_work()
        if not self._asleep and self._waiting and len(self._batch) < self.costs.slots:
            self._admit()
        self._set_timer()

    def _admit(self) -> None:
        batch = self._batch
        batch.settle(_now())
        # A request that ends with the current step is answered first: a prefill now would delay its answer.
        while self._waiting and len(batch) < self.costs.slots and not batch.ending:
            _, call = self._waiting.popitem(last=False)
            prompt = call.request.prompt_ids
            found = self._kept.find(call.request.conversation, prompt)
            call.reused = found[1] if found else 0
            if self.costs.prefill_token_s and self.costs.kept_prefixes:
                call.reused = len(prompt) - 1 if prompt.tobytes() in self._prompts else call.reused
                self._prompts[prompt.tobytes()] = call
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

    def _end(self, calls: Sequence[ModelledCall], *, answered: bool = True) -> None:
        """Ends calls: decoding ones at the next token boundary, others and all calls of a sleeping engine at once.

        `answered` is False if nobody reads the answers any more: the request ids are then free at once.
        """
        self._batch.settle(_now())
        for call in calls:
            if not answered:
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

    def _answer(self, call: ModelledCall, finish: FinishReason) -> None:
        place, ids = call.place, call.ids
        if finish is FinishReason.ABORT:
            ids = ids[: place.sampled_at(self._batch.steps)] if place else ids[:0]
        versions = self._loads.runs(place.first, len(ids)) if place else (VersionRun(0, self.version),)
        self._forget(call)
        self.answered_tokens += len(ids)
        if self.costs.prefill_token_s and call.request.conversation is not None and len(versions) == 1:
            self._kept.keep(call.request.conversation, Kept(np.concatenate((call.request.prompt_ids, ids[:-1]))))
        logprobs = self._logprobs(call.request, len(ids))
        call.answers.put_nowait(call.generation(ids, logprobs, finish, versions))

    def _forget(self, call: ModelledCall) -> None:
        """Marks a call as over and frees its request id."""
        call.over = True
        prompt = call.request.prompt_ids.tobytes() if self._prompts else b""
        if self._prompts.get(prompt) is call:
            del self._prompts[prompt]
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]

    def _sampled(self) -> list[int]:
        """Returns the tokens of each request in the batch, including the step in progress."""
        steps = self._batch.steps_at(_now())
        return [call.place.sampled_at(steps) for call in self._calls.values() if call.place]

    def _record_work(self) -> None:
        """Reports to the host when work begins and ends, and counts the seconds in between."""
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

    def _lose(self, because: str) -> None:
        self._lost = because
        self._rest()
        self._batch.stop(_now())
        self._set_timer()
        for call in list(self._calls.values()):
            self._forget(call)

    def _check_alive(self) -> None:
        if self._lost:
            raise EngineError(self._lost)


@lru_cache(maxsize=256)
def _digest_of(tensors: tuple[tuple[str, torch.dtype, torch.Size, bytes], ...]) -> Checksum:
    """The checksum of tensors with these bytes. It is remembered: hundreds of instances read the same few numbers."""
    return checksum(
        {name: torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) for name, dtype, shape, raw in tensors}
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _prefix_memory(costs: EngineCosts) -> KeptPrefixes:
    """Makes the memory of past prompts. It keeps nothing if prompt tokens cost nothing."""
    return KeptPrefixes(costs.kept_prefixes if costs.prefill_token_s else 0)
