"""Scripted inference engines; the conformance suites for real ones are in `engine_checks.py`, importable from here."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.interface import EngineCapabilities
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationRequest,
    PolicyName,
    Sampling,
    Version,
    VersionRun,
)
from flexmarl.testing.engine_checks import check_frozen_engine, check_inference_engine

__all__ = [
    "FrozenEngine",
    "Script",
    "ScriptedEngine",
    "check_frozen_engine",
    "check_inference_engine",
    "scripted_logprob",
    "utf8_ids",
    "utf8_text",
]

Script = Callable[[GenerationRequest], str | Sequence[int]]
"""What the engine answers to a request: text (encoded by the engine's `encode`) or ids, before any stop."""


def utf8_ids(text: str) -> list[int]:
    """The scripted engine's default tokens: bytes."""
    return list(text.encode())


def utf8_text(ids: Sequence[int]) -> str:
    """The inverse of `utf8_ids`."""
    return bytes(ids).decode(errors="replace")


@dataclass(slots=True)
class _Reply:
    request: GenerationRequest
    ids: list[int]
    finish: FinishReason
    versions: list[VersionRun]
    sent: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """Engine that says what it is told, a token at a time; pure asyncio, so it runs in virtual time.

    >>> engine = ScriptedEngine(lambda request: "42")
    """

    def __init__(
        self,
        script: Script,
        *,
        latency_s: float = 0.0,
        encode: Callable[[str], Sequence[int]] = utf8_ids,
        decode: Callable[[Sequence[int]], str] = utf8_text,
        version: Version = FIRST_VERSION,
        checksum: Callable[[ObjectKey], Checksum] = lambda key: Checksum(f"sum:{key}"),
    ) -> None:
        """`latency_s` is the time per token; `checksum` is what a load reports, or raises."""
        self._script, self._latency_s, self._encode, self._decode = script, latency_s, encode, decode
        self._checksum = checksum
        self._running: dict[str, _Reply] = {}
        self._generated = 0
        self._failure: str = ""
        self._awake = asyncio.Event()
        self._awake.set()
        self.version = version
        self.requests: list[GenerationRequest] = []
        """All that ever came, in order."""
        self.batches: list[int] = []
        """How many came together in each `generate` call."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        self._check_alive()
        self.requests.extend(requests)
        self.batches.append(len(requests))
        answers: asyncio.Queue[Generation | EngineError] = asyncio.Queue()
        players = [
            asyncio.create_task(self._play(request, answers), name=f"reply-{request.request_id}")
            for request in requests
        ]
        try:
            for _ in requests:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    raise EngineError(self._failure) from answer
                yield answer
        finally:
            if left := [player for player in players if not player.done()]:
                for player in left:
                    player.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests now."""
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].aborted.set()

    async def usage(self) -> EngineUse:
        """The load right now."""
        left = sum(len(reply.ids) - reply.sent for reply in self._running.values())
        return EngineUse(
            running=len(self._running), queued_tokens=left, generated_tokens=self._generated, version=self.version
        )

    async def capabilities(self) -> EngineCapabilities:
        """All of them."""
        return EngineCapabilities(
            loads_weights=True, sleeps=True, deterministic=True, continues=True, raw_logprobs=True, adapters=True
        )

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Stamps the version; running replies record the change."""
        self._check_alive()
        held = self._checksum(key)
        self.version = version
        for reply in self._running.values():
            past = (run for run in reply.versions if run.start < reply.sent)
            reply.versions = [*past, VersionRun(reply.sent, version)]
        return held

    async def sleep(self) -> None:
        """Replies stand still."""
        self._check_alive()
        self._awake.clear()

    async def wake(self) -> None:
        """They go on."""
        self._check_alive()
        self._awake.set()

    async def close(self) -> None:
        """Aborts what runs."""
        self._failure = self._failure or "the scripted engine is closed"
        await self.abort(list(self._running))

    def fail(self, reason: str = "the scripted engine was lost") -> None:
        """Loses the engine: every running and every later `generate` raises EngineError."""
        self._failure = reason
        for reply in self._running.values():
            reply.finish = FinishReason.ERROR
            reply.aborted.set()

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineError(self._failure)

    def _left_to_say(self, request: GenerationRequest) -> tuple[list[int], FinishReason]:
        """Of a request that another instance began, the script sees the original: it says the same."""
        asked, begun = request, request.offset
        if begun:
            sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + begun)
            asked = replace(request, prompt_ids=request.prompt_ids[:-begun], offset=0, sampling=sampling)
        said = self._script(asked)
        ids, finish = self._cut(list(self._encode(said) if isinstance(said, str) else said), asked.sampling)
        return ids[begun:], finish

    async def _play(self, request: GenerationRequest, answers: asyncio.Queue[Generation | EngineError]) -> None:
        if not len(request.prompt_ids):
            answers.put_nowait(_generation(request, [], FinishReason.ERROR, [VersionRun(0, self.version)], "no prompt"))
            return
        if request.request_id in self._running:
            problem = f"request id '{request.request_id}' is in use; ids must be unique among running requests"
            answers.put_nowait(_generation(request, [], FinishReason.ERROR, [VersionRun(0, self.version)], problem))
            return
        ids, finish = self._left_to_say(request)
        reply = _Reply(request, ids, finish, [VersionRun(0, self.version)])
        self._running[request.request_id] = reply
        try:
            while reply.sent < len(ids) and not reply.aborted.is_set():
                if self._latency_s:
                    await _either(reply.aborted, self._latency_s)
                else:
                    await asyncio.sleep(0)
                await self._until_awake(reply)
                if not reply.aborted.is_set():
                    reply.sent += 1
                    self._generated += 1
        finally:
            del self._running[request.request_id]
        if reply.finish is FinishReason.ERROR:
            answers.put_nowait(EngineError(self._failure))
            return
        finish = FinishReason.ABORT if reply.sent < len(ids) else reply.finish
        answers.put_nowait(_generation(request, ids[: reply.sent], finish, reply.versions))

    async def _until_awake(self, reply: _Reply) -> None:
        if self._awake.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self._awake, reply.aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _cut(self, ids: list[int], sampling: Sampling) -> tuple[list[int], FinishReason]:
        """The reply up to the first stop condition, or up to `max_tokens`; a script that just ends has stopped."""
        for end in range(1, min(len(ids), sampling.max_tokens) + 1):
            text = self._decode(ids[:end]) if sampling.stop else ""
            if ids[end - 1] in sampling.stop_ids or any(stop in text for stop in sampling.stop):
                return ids[:end], FinishReason.STOP
        cut = len(ids) > sampling.max_tokens
        return ids[: sampling.max_tokens], FinishReason.LENGTH if cut else FinishReason.STOP


class FrozenEngine:
    """Engine that only generates, such as one in front of a judge's HTTP API; it says what its script says.

    >>> engine = FrozenEngine(lambda request: "42")
    """

    def __init__(self, script: Script, **changes: Any) -> None:
        """`changes` are keyword arguments of a ScriptedEngine."""
        self._scripted = ScriptedEngine(script, **changes)

    @property
    def requests(self) -> list[GenerationRequest]:
        """All that ever came, in order."""
        return self._scripted.requests

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        async with aclosing(self._scripted.generate(requests)) as answers:  # type: ignore[type-var]
            async for generation in answers:
                yield generation

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests now."""
        await self._scripted.abort(request_ids)

    async def usage(self) -> EngineUse:
        """The load right now."""
        return await self._scripted.usage()

    async def capabilities(self) -> EngineCapabilities:
        """None that has a name: it generates."""
        return EngineCapabilities()

    async def close(self) -> None:
        """Aborts what runs."""
        await self._scripted.close()


def scripted_logprob(seed: int, index: int) -> float:
    """The deterministic log-probability that a ScriptedEngine reports for token `index` of a request."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return -2.0 * int.from_bytes(digest) / 2**32


def _generation(
    request: GenerationRequest, ids: list[int], finish: FinishReason, versions: list[VersionRun], error: str = ""
) -> Generation:
    logprobs = np.asarray([scripted_logprob(request.seed, request.offset + i) for i in range(len(ids))], np.float32)
    runs = tuple(run for run in versions if run.start < len(ids)) or tuple(versions[:1])
    return Generation(
        request_id=request.request_id,
        response_ids=np.asarray(ids, np.int32),
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=runs,
        finish=finish,
        error=error,
    )


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
