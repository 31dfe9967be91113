"""Scripted inference engines. The conformance suites are in `engine_checks.py`, and can be imported from here too."""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from flexmarl.analysis.costs import EngineCosts
from flexmarl.inference.interface import FIRST_VERSION, EngineCapabilities
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
from flexmarl.records import (
    EngineUse,
    FinishReason,
    FloatArray,
    Generation,
    GenerationProgress,
    GenerationRequest,
    IntArray,
    Version,
)
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.replies import Responder
from flexmarl.testing.engine_checks import check_frozen_engine, check_inference_engine

__all__ = ["FrozenEngine", "Script", "ScriptedEngine", "check_frozen_engine", "check_inference_engine"]
__all__ += ["scripted_logprob", "utf8_ids", "utf8_text"]

Script = Callable[[GenerationRequest], str | Sequence[int]]
"""request -> the engine's answer before stops apply: text (encoded by the engine's `encode`) or ids."""


def utf8_ids(text: str) -> list[int]:
    """Encodes text as bytes, the scripted engine's default tokens."""
    return list(text.encode())


def utf8_text(ids: Sequence[int]) -> str:
    """The inverse of `utf8_ids`."""
    return bytes(ids).decode(errors="replace")


class ScriptedEngine(ModelledEngine):
    """A modelled engine that answers by a script, and records requests and answers. It serves any policy.

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
        objects: ObjectStore | None = None,
        checksum: Callable[[ObjectKey], Checksum] = lambda key: Checksum(f"sum:{key}"),
        fails: Callable[[GenerationRequest], str] = lambda request: "",
        costs: EngineCosts | None = None,
    ) -> None:
        """`latency_s` is the time per token; nothing else takes time. `costs`, if given, replaces it.

        A load reports the checksum of the object in `objects`. Without `objects` it calls `checksum`, which may raise.
        `fails` gives the reason why a call ends with finish `error`, or "" if it shall succeed.
        """
        super().__init__(
            costs or token_costs(latency_s),
            scripted_responder(script, encode, decode),
            objects=objects,
            version=version,
            logprobs=scripted_logprobs,
        )
        self._checksum, self._fails = checksum, fails
        self.requests: list[GenerationRequest] = []
        """All requests, in order of arrival."""
        self.batches: list[int] = []
        """Number of requests in each `generate` call."""
        self.generations: list[Generation] = []
        """All answers, in order."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order."""
        self._check_alive()
        self.requests.extend(requests)
        self.batches.append(len(requests))
        reasons = {request.request_id: self._fails(request) for request in requests}
        async with aclosing(super().generate(requests)) as answers:  # type: ignore[type-var]
            async for generation in answers:
                if isinstance(generation, GenerationProgress):
                    yield generation
                    continue
                if reason := reasons[generation.request_id]:
                    generation = replace(generation, finish=FinishReason.ERROR, error=reason)
                self.generations.append(generation)
                yield generation

    async def fetch(self, key: ObjectKey) -> Checksum:
        """Returns the checksum of the stored object, or the scripted one if there is no object store."""
        return self._checksum(key) if self._objects is None else await super().fetch(key)


def token_costs(seconds: float) -> EngineCosts:
    """Returns costs by which only tokens take time, `seconds` each, and there is room for every request."""
    return EngineCosts(slots=1 << 20, decode_s=seconds, decode_request_s=0.0, move_s=0.0, start_s=0.0)


def scripted_responder(
    script: Script,
    encode: Callable[[str], Sequence[int]] = utf8_ids,
    decode: Callable[[Sequence[int]], str] = utf8_text,
) -> Responder:
    """Makes a responder from a script. Its ids end with the token that completes a stop string."""

    def respond(request: GenerationRequest) -> IntArray:
        reply = script(request)
        ids = list(encode(reply) if isinstance(reply, str) else reply)
        stops = request.sampling.stop
        for end in range(1, min(len(ids), request.sampling.max_tokens) + 1 if stops else 0):
            if any(stop in decode(ids[:end]) for stop in stops):
                return np.asarray(ids[:end], np.int32)
        return np.asarray(ids, np.int32)

    return respond


class FrozenEngine:
    """Engine that only generates, such as one in front of a judge's HTTP API. It answers by a script.

    >>> engine = FrozenEngine(lambda request: "42")
    """

    def __init__(self, script: Script, **changes: Any) -> None:
        """`changes` are keyword arguments of a ScriptedEngine."""
        self._scripted = ScriptedEngine(script, **changes)

    @property
    def requests(self) -> list[GenerationRequest]:
        """All requests, in order of arrival."""
        return self._scripted.requests

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order."""
        async with aclosing(self._scripted.generate(requests)) as answers:  # type: ignore[type-var]
            async for generation in answers:
                yield generation

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests now."""
        await self._scripted.abort(request_ids)

    async def usage(self) -> EngineUse:
        """Returns the current load."""
        return await self._scripted.usage()

    async def capabilities(self) -> EngineCapabilities:
        """Returns no capabilities: the engine only generates."""
        return EngineCapabilities()

    async def close(self) -> None:
        """Aborts all running requests."""
        await self._scripted.close()


def scripted_logprob(seed: int, index: int) -> float:
    """Returns the deterministic log-probability that a ScriptedEngine reports for token `index` of a request."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return -2.0 * int.from_bytes(digest) / 2**32


def scripted_logprobs(request: GenerationRequest, num_tokens: int) -> FloatArray:
    """Returns [num_tokens] log-probabilities, from the request's offset on: another instance may have begun it."""
    return np.asarray([scripted_logprob(request.seed, request.offset + i) for i in range(num_tokens)], np.float32)
