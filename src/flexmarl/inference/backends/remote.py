"""Engine in another process: what `inference/interface.py` asks, over the calls of one worker.

    generate --> outbox --> submit --.                .--> each call's answers
    abort    --> aborts --> abort  --+-- the worker --+
                                     '--- collect, again and again

consumes:     requests and aborts; those that come while a crossing is under way go together in the next
waits for:    the worker
produces:     generations, in the batches in which the worker has them
unblocked by: a request; the two tasks exist only while there is something to send or to wait for
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flexmarl.cluster.interface import Worker
from flexmarl.errors import EngineError, WorkerError, boundary
from flexmarl.inference.backends.host import Collected
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationRequest,
    PolicyName,
    Version,
    unserved,
)

CLOSE_TIMEOUT_S = 10.0
"""For the answers that are still under way: a worker that hangs is ended without them."""

_Answers = asyncio.Queue[Generation | EngineError]


@dataclass(slots=True)
class _Call:
    """A request that is under way, and who waits for it: nobody, if the reader left."""

    max_tokens: int
    answers: _Answers | None


class RemoteEngine:
    """`WeightedEngine` whose EngineHost is in a worker's process. Any call that the worker fails loses the engine."""

    def __init__(self, worker: Worker, policy: PolicyName, *, version: Version = FIRST_VERSION) -> None:
        """The worker is the engine's own from here on: closing the engine frees its device, and so ends the process."""
        self._worker, self._policy = worker, policy
        self._outbox: list[GenerationRequest] = []
        self._aborts: set[str] = set()
        self._calls: dict[str, _Call] = {}
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._use = EngineUse(version=version)
        self._closed = ""
        self._told_to_close = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        if self._closed:
            raise EngineError(self._closed)
        answers: _Answers = asyncio.Queue()
        self._enter(requests, answers)
        try:
            for _ in requests:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    raise EngineError(str(answer)) from answer
                yield answer
        finally:
            await self.abort(self._leave(requests, answers))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests at the next token boundary; returns before they have ended."""
        self._aborts.update(request_id for request_id in request_ids if request_id in self._calls)
        self._go_on()

    async def usage(self) -> EngineUse:
        """What is under way from here, shared out as the worker last said: no crossing."""
        running = min(self._use.running, len(self._calls))
        return replace(
            self._use,
            running=running,
            queued=len(self._calls) - running,
            queued_tokens=sum(call.max_tokens for call in self._calls.values()),
        )

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Has the worker get the object and swap the weights between two turns."""
        with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
            held: Checksum = await self._ask("load_weights", policy, version, key)
        self._use = replace(self._use, version=version)
        return held

    async def sleep(self) -> None:
        """As the worker's engine does; requests that cross meanwhile wait there."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """As the worker's engine does."""
        await self._ask("wake")

    async def close(self) -> None:
        """Ends what runs with finish `abort`, as far as the worker still answers, and then the worker's process."""
        if self._told_to_close:
            return
        self._told_to_close = True
        self._closed = self._closed or f"the engine of '{self._policy}' is closed"
        try:
            with suppress(WorkerError, EngineError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._close_host()
        finally:
            self._give_up(EngineError(self._closed))
            await self._worker.stop()

    async def _close_host(self) -> None:
        """What was sent before is sent, and what was asked for is answered."""
        if self._sender is not None:
            await asyncio.wait([self._sender])
        await self._worker.call("close")
        if self._collector is not None:
            await asyncio.wait([self._collector])

    async def _ask(self, method: str, *args: Any) -> Any:
        """A call whose answer is waited for. A worker that is gone loses the engine."""
        if self._closed:
            raise EngineError(self._closed)
        try:
            return await self._worker.call(method, *args)
        except WorkerError as error:
            self._lose(error)
            raise EngineError(self._closed) from error

    def _enter(self, requests: Sequence[GenerationRequest], answers: _Answers) -> None:
        for request in requests:
            if request.request_id in self._calls:
                problem = f"request id '{request.request_id}' is in use; ids must be unique among running requests"
                answers.put_nowait(unserved(request, self._use.version, FinishReason.ERROR, problem))
            else:
                self._calls[request.request_id] = _Call(request.sampling.max_tokens, answers)
                self._outbox.append(request)
        self._go_on()

    def _leave(self, requests: Sequence[GenerationRequest], answers: _Answers) -> list[str]:
        """Gives up waiting; returns the ids that are under way. They stay taken until the worker has answered them."""
        left: list[str] = []
        for request in requests:
            call = self._calls.get(request.request_id)
            if call is not None and call.answers is answers:
                call.answers = None
                left.append(request.request_id)
        return left

    def _go_on(self) -> None:
        if (self._outbox or self._aborts) and (self._sender is None or self._sender.done()):
            self._sender = asyncio.create_task(self._send(), name=f"send-{self._worker.name}")
        if self._calls and (self._collector is None or self._collector.done()):
            self._collector = asyncio.create_task(self._collect(), name=f"collect-{self._worker.name}")

    async def _send(self) -> None:
        """One crossing after the other, so that no abort overtakes its request."""
        try:
            while self._outbox or self._aborts:
                outbox, self._outbox = self._outbox, []
                if outbox:
                    await self._worker.call("submit", outbox)
                aborts, self._aborts = self._aborts, set()
                if aborts:
                    await self._worker.call("abort", sorted(aborts))
        except Exception as error:
            # Whatever a crossing raises, it is the engine that is lost.
            self._lose(error)

    async def _collect(self) -> None:
        """Hands out answers until none is awaited."""
        try:
            while self._calls:
                collected: Collected = await self._worker.call("collect")
                self._use = collected.use
                for generation in collected.generations:
                    self._answer(generation)
        except Exception as error:
            self._lose(error)

    def _answer(self, generation: Generation) -> None:
        self._aborts.discard(generation.request_id)
        call = self._calls.pop(generation.request_id, None)
        if call is not None and call.answers is not None:
            call.answers.put_nowait(generation)

    def _lose(self, error: Exception) -> None:
        """Every call that waits, and every later one, raises EngineError with the reason."""
        reason = str(error) if isinstance(error, EngineError | WorkerError) else f"{type(error).__name__}: {error}"
        self._closed = self._closed or f"the engine of '{self._policy}' is lost: {reason}"
        failure = EngineError(self._closed)
        failure.__cause__ = error
        self._give_up(failure)

    def _give_up(self, failure: EngineError) -> None:
        for answers in {call.answers for call in self._calls.values() if call.answers is not None}:
            answers.put_nowait(failure)
        self._calls.clear()
        self._outbox.clear()
        self._aborts.clear()
        for task in (self._sender, self._collector):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
