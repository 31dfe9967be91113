"""Scripted inference engine, and the conformance suite for any engine of `flexmarl.inference.interface`.

    async def make_engine() -> MyEngine: ...
    await check_inference_engine(make_engine, policy="solver")

raises AssertionError with the broken clause of the contract. An engine whose weights we own also takes `publish`.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    PolicyName,
    Sampling,
    Version,
    VersionRun,
)

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


Published = tuple[ObjectKey, Checksum]
Publish = Callable[[], Awaitable[Published]]
"""Sets other weights under a key of its own. Called once."""


async def check_inference_engine(
    make_engine: Callable[[], Awaitable[InferenceEngine]],
    *,
    policy: PolicyName,
    prompt: Sequence[int] = (1, 2, 3),
    stop_text: Callable[[Sequence[int]], str] | None = None,
    seeded: bool = True,
    publish: Publish | None = None,
) -> None:
    """Puts a fresh engine through every clause of the contract; raises AssertionError with the one it breaks.

    The engine must be able to generate at least 64 tokens after `prompt`. `stop_text` decodes its ids, if it knows
    stop strings; `seeded` says that temperature-1 sampling follows the request's seed; `publish` sets other weights
    in the engine's object store, for a WeightedEngine.
    """
    check = _Check(policy, np.asarray(prompt, np.int32), seeded=seeded)
    for clause in (
        check.answers_every_request_once,
        check.honours_max_tokens,
        check.answers_a_bad_request_with_an_error,
        check.stops_at_ids,
        check.aborts,
        check.survives_a_reader_that_leaves,
        check.reports_its_load,
    ):
        await _on_fresh(make_engine, clause)
    if seeded:
        await _on_fresh(make_engine, check.follows_the_seed)
    if stop_text is not None:
        await _on_fresh(make_engine, lambda engine: check.stops_at_text(engine, stop_text))
    if publish is not None:
        published = await publish()
        await _on_fresh(make_engine, check.sleeps)
        for clause in (check.loads_weights, check.loads_weights_asleep):
            await _on_fresh(make_engine, partial(clause, published=published))
    await check.closes(await make_engine())


async def _on_fresh(
    make_engine: Callable[[], Awaitable[InferenceEngine]], clause: Callable[[InferenceEngine], Awaitable[None]]
) -> None:
    engine = await make_engine()
    try:
        await clause(engine)
    finally:
        await engine.close()


class _Check:
    """The clauses of the contract."""

    def __init__(self, policy: PolicyName, prompt: IntArray, *, seeded: bool) -> None:
        self._policy, self._prompt, self._seeded = policy, prompt, seeded

    async def answers_every_request_once(self, engine: InferenceEngine) -> None:
        """One Generation per request, the short ones first, arrays and version runs in order."""
        lengths = [12, 3, 6, 1]
        got = await self._all(engine, [self._request(f"r{i}", max_tokens=n) for i, n in enumerate(lengths)])
        assert sorted(g.request_id for g in got) == ["r0", "r1", "r2", "r3"], "every request needs exactly one answer"
        ends = [len(g.response_ids) for g in got]
        assert ends == sorted(ends), f"answers must come in completion order, got lengths {ends}"
        for generation in got:
            size = len(generation.response_ids)
            assert len(generation.logprobs) == len(generation.raw_logprobs) == size, "ids and logprobs differ in length"
            assert generation.response_ids.dtype == np.int32, "response_ids must be int32"
            assert generation.logprobs.dtype == generation.raw_logprobs.dtype == np.float32, "logprobs must be float32"
            assert (generation.raw_logprobs <= 1e-6).all(), "log-probabilities must not exceed 0"
            assert generation.versions[0].start == 0, "version runs must start at offset 0"

    async def honours_max_tokens(self, engine: InferenceEngine) -> None:
        """A request that does not stop ends with `length`, after exactly max_tokens."""
        (generation,) = await self._all(engine, [self._request("r", max_tokens=5)])
        assert len(generation.response_ids) == 5, f"max_tokens was 5, got {len(generation.response_ids)} tokens"
        assert generation.finish is FinishReason.LENGTH, f"finish must be length, got {generation.finish}"

    async def answers_a_bad_request_with_an_error(self, engine: InferenceEngine) -> None:
        """An empty prompt fails alone, with a message; its neighbour is served."""
        bad = GenerationRequest(
            request_id="bad", policy=self._policy, prompt_ids=np.zeros(0, np.int32), sampling=Sampling(), seed=0
        )
        got = {g.request_id: g for g in await self._all(engine, [bad, self._request("good", max_tokens=2)])}
        assert got["bad"].finish is FinishReason.ERROR, "an empty prompt must end with finish error"
        assert got["bad"].error, "finish error needs a message"
        assert got["good"].finish is FinishReason.LENGTH, "a bad request must not harm its neighbour"

    async def stops_at_ids(self, engine: InferenceEngine) -> None:
        """The response ends with the first stop id, which stays in it."""
        (free,) = await self._all(engine, [self._request("free", max_tokens=12)])
        stop = int(free.response_ids[6])
        first = free.response_ids.tolist().index(stop)
        (cut,) = await self._all(engine, [self._request("cut", max_tokens=12, stop_ids=(stop,))])
        assert cut.response_ids.tolist() == free.response_ids[: first + 1].tolist(), "the stop id must end the response"
        assert cut.finish is FinishReason.STOP, f"finish must be stop, got {cut.finish}"

    async def stops_at_text(self, engine: InferenceEngine, decode: Callable[[Sequence[int]], str]) -> None:
        """The response ends with the token that completes the stop string."""
        (free,) = await self._all(engine, [self._request("free", max_tokens=12)])
        ids = free.response_ids.tolist()
        stop = decode(ids[4:7])
        end = next(n for n in range(1, 13) if stop in decode(ids[:n]))
        (cut,) = await self._all(engine, [self._request("cut", max_tokens=12, stop=(stop,))])
        assert cut.response_ids.tolist() == ids[:end], f"the stop string {stop!r} must end the response"
        assert cut.finish is FinishReason.STOP, f"finish must be stop, got {cut.finish}"

    async def aborts(self, engine: InferenceEngine) -> None:
        """An aborted request comes back with all that was sampled of it; unknown ids are no error."""
        await engine.abort(["nobody"])
        got: list[Generation] = []
        requests = [self._request("long", max_tokens=64), self._request("short", max_tokens=3)]
        async for generation in engine.generate(requests):
            got.append(generation)
            await engine.abort(["long", "short"])
        assert [g.request_id for g in got] == ["short", "long"], "both must be answered"
        short, long = got
        assert long.finish is FinishReason.ABORT, f"finish must be abort, got {long.finish}"
        size = len(long.response_ids)
        assert 0 < size < 64, f"an aborted request keeps what was sampled, and does not run to its end; got {size}"
        assert len(long.logprobs) == len(long.raw_logprobs) == size, "ids and logprobs of an abort differ in length"
        assert long.versions[0].start == 0, "version runs must start at offset 0"
        if self._seeded:
            both = min(size, len(short.response_ids))
            same = np.array_equal(long.response_ids[:both], short.response_ids[:both])
            assert same, "an aborted request keeps the tokens that its seed gives"

    async def survives_a_reader_that_leaves(self, engine: InferenceEngine) -> None:
        """Cancelling a reader frees the engine for the next one, even under the same ids."""
        began = asyncio.Event()

        async def read() -> None:
            began.set()
            await self._all(engine, [self._request("again", max_tokens=12)])

        reader = asyncio.create_task(read(), name="leaving-reader")
        await began.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        (generation,) = await self._all(engine, [self._request("after", max_tokens=2)])
        assert len(generation.response_ids) == 2, "the engine must serve on after a reader left"

    async def reports_its_load(self, engine: InferenceEngine) -> None:
        """An idle engine reports no work."""
        await self._all(engine, [self._request("r", max_tokens=3)])
        use = await engine.usage()
        assert use.running == use.queued == use.queued_tokens == 0, f"an idle engine must report no work, got {use}"
        assert use.generated_tokens >= 3, f"3 tokens were generated, got {use.generated_tokens}"

    async def follows_the_seed(self, engine: InferenceEngine) -> None:
        """Equal seeds give equal tokens, alone or in company, logprobs too."""
        (alone,) = await self._all(engine, [self._request("alone", seed=5)])
        company = [self._request(f"r{seed}", seed=seed) for seed in range(8)]
        same = next(g for g in await self._all(engine, company) if g.request_id == "r5")
        assert same.response_ids.tolist() == alone.response_ids.tolist(), "equal seeds must give equal tokens"
        assert np.allclose(same.logprobs, alone.logprobs, atol=1e-4), "equal tokens must have equal logprobs"

    async def loads_weights(self, engine: InferenceEngine, published: Published) -> None:
        """A load returns the checksum of what was published; later tokens carry the new version."""
        weighted = self._weighted(engine)
        key, expected = published
        held = await weighted.load_weights(self._policy, Version(7), key)
        assert held == expected, f"the engine must hold what was published: {expected}, got {held}"
        assert (await engine.usage()).version == 7, "the version must be stamped"
        (generation,) = await self._all(engine, [self._request("r", max_tokens=2)])
        assert generation.versions == (VersionRun(0, Version(7)),), f"version 7 must be recorded: {generation.versions}"
        try:
            await weighted.load_weights(self._policy, Version(8), ObjectKey("no/such/object"))
        except (EngineError, KeyError):
            assert (await engine.usage()).version == 7, "a failed load must leave the old version"

    async def sleeps(self, engine: InferenceEngine) -> None:
        """What runs stands still, what comes waits, both go on as if nothing had been; an abort is heard asleep."""
        weighted, clock = self._weighted(engine), asyncio.get_running_loop().time
        began = clock()
        (alone,) = await self._all(engine, [self._request("alone", max_tokens=32)])
        long_enough_s = clock() - began
        early = asyncio.create_task(self._all(engine, [self._request("early", max_tokens=32)]), name="early-reader")
        for _ in range(3):
            await asyncio.sleep(0)
        await weighted.sleep()
        await weighted.sleep()
        requests = [self._request("late"), self._request("aborted", max_tokens=64)]
        late = engine.generate(requests)
        reader = asyncio.ensure_future(anext(late))
        for _ in range(100):  # an engine whose tokens take no time still needs its turns
            await asyncio.sleep(long_enough_s / 100)
        await engine.abort(["aborted"])
        first = await reader
        assert (first.request_id, first.finish) == ("aborted", FinishReason.ABORT), f"an abort must be heard: {first}"
        assert len(first.response_ids) == 0, "an engine that sleeps must not sample"
        await weighted.wake()
        await weighted.wake()
        assert [g.request_id async for g in late] == ["late"], "what came meanwhile must be served after waking up"
        (same,) = await early
        assert same.response_ids.tolist() == alone.response_ids.tolist(), "sleep must not change what runs"
        assert np.allclose(same.logprobs, alone.logprobs, atol=1e-4), "sleep must not change what runs"

    async def loads_weights_asleep(self, engine: InferenceEngine, published: Published) -> None:
        """It wakes with the weights that it has loaded meanwhile."""
        weighted = self._weighted(engine)
        await weighted.sleep()
        key, expected = published
        assert await weighted.load_weights(self._policy, Version(7), key) == expected, "asleep, it must load weights"
        await weighted.wake()
        (generation,) = await self._all(engine, [self._request("r", max_tokens=2)])
        assert generation.versions == (VersionRun(0, Version(7)),), f"version 7 must be recorded: {generation.versions}"

    async def closes(self, engine: InferenceEngine) -> None:
        """Closing ends what runs, twice is no error, and nothing is served afterwards."""
        reader = asyncio.create_task(self._all(engine, [self._request("r", max_tokens=12)]), name="reader")
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        (outcome,) = await asyncio.gather(reader, return_exceptions=True)
        ended = isinstance(outcome, EngineError) or (isinstance(outcome, list) and len(outcome) == 1)
        assert ended, f"a reader must end when the engine closes, got {outcome!r}"
        try:
            await self._all(engine, [self._request("late", max_tokens=1)])
        except EngineError:
            return
        raise AssertionError("a closed engine must raise EngineError")

    def _weighted(self, engine: InferenceEngine) -> WeightedEngine:
        for method in ("load_weights", "sleep", "wake"):
            assert hasattr(engine, method), f"a WeightedEngine needs {method}"
        return engine  # type: ignore[return-value]

    def _request(
        self,
        request_id: str,
        *,
        max_tokens: int = 8,
        seed: int = 1,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            policy=self._policy,
            prompt_ids=self._prompt,
            sampling=Sampling(max_tokens=max_tokens, stop=stop, stop_ids=stop_ids),
            seed=seed,
        )

    async def _all(self, engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [generation async for generation in engine.generate(requests)]
