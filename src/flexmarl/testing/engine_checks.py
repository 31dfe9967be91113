"""Conformance suites for engines of `flexmarl.inference.interface`.

    async def make_engine() -> MyEngine: ...
    await check_inference_engine(make_engine, policy="solver")
    await check_frozen_engine(make_engine, policy="judge")

Both raise AssertionError with the broken clause of the contract. Pass `publish` too for an engine that loads weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import cast

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.inference.calls import joined
from flexmarl.inference.interface import EngineCapabilities, InferenceEngine, WeightedEngine, answers_of
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    FinishReason,
    Generation,
    GenerationProgress,
    GenerationRequest,
    IntArray,
    PolicyName,
    Sampling,
    Version,
    VersionRun,
)

Published = tuple[Version, Checksum]
Publish = Callable[[Version], Awaitable[Checksum]]
"""Puts other weights into the object store, as this version of the policy (`weights_key`). Called once."""
WHOLE, ADAPTER, MISSING = Version(7), Version(8), Version(9)
"""The version of whole weights, that of an adapter, and one that is never published."""


async def check_inference_engine(
    make_engine: Callable[[], Awaitable[InferenceEngine]],
    *,
    policy: PolicyName,
    prompt: Sequence[int] = (1, 2, 3),
    stop_text: Callable[[Sequence[int]], str] | None = None,
    seeded: bool = True,
    publish: Publish | None = None,
    publish_adapter: Publish | None = None,
    coarse: bool = False,
) -> None:
    """Checks every clause of the contract on a fresh engine; raises AssertionError with the one that it breaks.

    Claimed capabilities are checked too. The engine must be able to generate at least 64 tokens after `prompt`.
    `stop_text` decodes its ids, for an engine that supports stop strings. `seeded` says that sampling at temperature 1
    follows the request's seed. `publish` puts other weights into the engine's object store, for an engine that loads
    weights. `publish_adapter` does so with an adapter of the weights that the engine began with, for an engine that
    takes adapters. `coarse` says that it computes in bfloat16, where the order of sums decides some tokens.
    """
    check = _Check(policy, np.asarray(prompt, np.int32), seeded=seeded, coarse=coarse)
    for clause in (
        check.answers_every_request_once,
        check.honours_max_tokens,
        check.answers_a_bad_request_with_an_error,
        check.stops_at_ids,
        check.aborts,
        check.tells_what_it_samples,
        check.says_what_it_can_do,
        check.survives_a_reader_that_leaves,
        check.reports_its_load,
    ):
        await _on_fresh(make_engine, clause)
    if seeded:
        await _on_fresh(make_engine, check.follows_the_seed)
    if stop_text is not None:
        await _on_fresh(make_engine, lambda engine: check.stops_at_text(engine, stop_text))
    can = await _claims(make_engine)
    for claimed, clause in (
        (can.deterministic, check.computes_the_same_bits_in_company),
        (can.continues, check.continues_what_another_began),
        (can.raw_logprobs and seeded, check.reports_raw_logprobs),
        (can.sleeps, check.sleeps),
    ):
        if claimed:
            await _on_fresh(make_engine, clause)
    if publish is not None:
        assert can.loads_weights, "`publish` is for an engine whose capabilities say that it loads weights"
        published = (WHOLE, await publish(WHOLE))
        await _on_fresh(make_engine, partial(check.loads_weights, published=published))
        if can.sleeps:
            await _on_fresh(make_engine, partial(check.loads_weights_asleep, published=published))
    if publish_adapter is not None:
        assert can.adapters, "`publish_adapter` is for an engine whose capabilities say that it takes adapters"
        adapter = (ADAPTER, await publish_adapter(ADAPTER))
        await _on_fresh(make_engine, partial(check.loads_weights, published=adapter))
        await _on_fresh(make_engine, partial(check.takes_an_adapter_again, published=adapter))
        if can.sleeps:
            await _on_fresh(make_engine, partial(check.loads_weights_asleep, published=adapter))
    await check.closes(await make_engine())


async def check_frozen_engine(
    make_engine: Callable[[], Awaitable[InferenceEngine]],
    *,
    policy: PolicyName,
    prompt: Sequence[int] = (1, 2, 3),
    stop_text: Callable[[Sequence[int]], str] | None = None,
    seeded: bool = False,
) -> None:
    """Checks an engine of frozen policies in the same way, such as one in front of a judge's API. It loads no weights.

    It needs `generate`, `abort`, `usage`, `capabilities` and `close`, and the methods that its capabilities claim.
    """
    can = await _claims(make_engine)
    assert not can.loads_weights, "an engine of frozen policies must not claim that it loads weights"
    await check_inference_engine(make_engine, policy=policy, prompt=prompt, stop_text=stop_text, seeded=seeded)


async def _claims(make_engine: Callable[[], Awaitable[InferenceEngine]]) -> EngineCapabilities:
    engine = await make_engine()
    try:
        return await engine.capabilities()
    finally:
        await engine.close()


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

    def __init__(self, policy: PolicyName, prompt: IntArray, *, seeded: bool, coarse: bool) -> None:
        self._policy, self._prompt, self._seeded, self._coarse = policy, prompt, seeded, coarse

    async def answers_every_request_once(self, engine: InferenceEngine) -> None:
        """Every request gets one Generation, in completion order, with well-formed arrays and version runs."""
        lengths = [48, 3, 6, 1]
        got = await self._all(engine, [self._request(f"r{i}", max_tokens=n) for i, n in enumerate(lengths)])
        assert sorted(g.request_id for g in got) == ["r0", "r1", "r2", "r3"], "every request needs exactly one answer"
        ends = [len(g.response_ids) for g in got]
        # The short ones may overtake each other where a server's sockets decide who begins.
        assert ends[-1] == lengths[0], f"answers must come in completion order, got lengths {ends}"
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
        """An empty prompt ends with finish `error` and a message. The other request of the call is served."""
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

    async def tells_what_it_samples(self, engine: InferenceEngine) -> None:
        """GenerationProgress of a request that streams is the beginning of its answer, without its last token."""
        telling, silent = replace(self._request("telling", max_tokens=12), streams=True), self._request("silent")
        parts: list[Generation] = []
        answers: dict[str, Generation] = {}
        async for found in engine.generate([telling, silent]):
            if isinstance(found, GenerationProgress):
                assert found.request_id == "telling" not in answers, f"nobody reads {found.request_id} along any more"
                parts.append(found.part)
            else:
                answers[found.request_id] = found
        assert answers.keys() == {"telling", "silent"}, "both must be answered"
        if not parts:
            return
        told, whole = reduce(joined, parts), answers["telling"]
        size = len(told.response_ids)
        assert 0 < size < len(whole.response_ids), "the last token comes with the answer"
        for name in ("response_ids", "logprobs", "raw_logprobs"):
            assert np.array_equal(getattr(told, name), getattr(whole, name)[:size]), f"{name} that were told differ"
        assert all(len(part.response_ids) for part in parts), "progress without tokens is none"

    async def aborts(self, engine: InferenceEngine) -> None:
        """An aborted request is answered with the tokens sampled so far. Unknown ids are ignored, and not kept."""
        await engine.abort(["nobody", "later"])
        (later,) = await self._all(engine, [self._request("later", max_tokens=2)])
        assert later.finish is not FinishReason.ABORT, "an abort does not end a request that came after it"
        got: list[Generation] = []
        requests = [self._request("long", max_tokens=64), self._request("short", max_tokens=3)]
        async for generation in answers_of(engine, requests):
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

    async def says_what_it_can_do(self, engine: InferenceEngine) -> None:
        """Capabilities are the same at every call, and the methods that they claim exist."""
        can = await engine.capabilities()
        assert isinstance(can, EngineCapabilities), f"capabilities must be EngineCapabilities, got {can!r}"
        await self._all(engine, [self._request("r", max_tokens=2)])
        assert await engine.capabilities() == can, "capabilities must be the same at every call"
        claimed = {"load_weights": can.loads_weights, "sleep": can.sleeps, "wake": can.sleeps}
        for method in (name for name, claims in claimed.items() if claims):
            assert callable(getattr(engine, method, None)), f"its capabilities claim {method}, which it does not have"

    async def computes_the_same_bits_in_company(self, engine: InferenceEngine) -> None:
        """Alone or among others, a request gets equal ids and equal bits of log-probabilities."""
        (alone,) = await self._all(engine, [self._request("alone", seed=3, max_tokens=16)])
        company = [self._request(f"r{seed}", seed=seed, max_tokens=5 + 11 * (seed == 3)) for seed in range(7)]
        same = next(g for g in await self._all(engine, company) if g.request_id == "r3")
        for name in ("response_ids", "logprobs", "raw_logprobs"):
            equal = np.array_equal(getattr(same, name), getattr(alone, name))
            assert equal, f"its capabilities claim that it is deterministic, but {name} depend on the company"

    async def continues_what_another_began(self, engine: InferenceEngine) -> None:
        """A request with an offset gets the token that the whole request would have got there.

        One in eight may differ, because a prompt is computed in another order than tokens one by one. With `coarse`
        logits three may differ. An engine that ignores the offset gets one right by chance, if any.
        """
        begun = 5
        whole = await self._all(engine, [self._request(str(s), seed=s, max_tokens=begun + 1) for s in range(8)])
        following = {g.request_id: int(g.response_ids[begun]) for g in whole}
        rests = [
            replace(
                self._request(g.request_id, seed=int(g.request_id), max_tokens=1),
                prompt_ids=np.concatenate([self._prompt, g.response_ids[:begun]]).astype(np.int32),
                offset=begun,
            )
            for g in whole
        ]
        same = [int(g.response_ids[0]) == following[g.request_id] for g in await self._all(engine, rests)]
        assert sum(same) >= (5 if self._coarse else 7), (
            f"its capabilities claim that it continues what another instance began, but behind {begun} tokens only "
            f"{sum(same)} of 8 requests get the token that they would have got there"
        )

    async def reports_raw_logprobs(self, engine: InferenceEngine) -> None:
        """A token's raw log-probability does not depend on temperature; compared where two draw the same token."""
        plain, sharp = [
            await self._all(
                engine,
                [self._request(f"r{seed}", seed=seed, max_tokens=1, temperature=temperature) for seed in range(32)],
            )
            for temperature in (1.0, 0.5)
        ]
        raw = {(g.request_id, int(g.response_ids[0])): float(g.raw_logprobs[0]) for g in plain}
        for generation in sharp:
            known = raw.get((generation.request_id, int(generation.response_ids[0])))
            got = float(generation.raw_logprobs[0])
            assert known is None or abs(known - got) < 1e-3, (
                f"its capabilities claim raw log-probabilities, but at temperature 0.5 one is {got}, at 1 {known}"
            )

    async def survives_a_reader_that_leaves(self, engine: InferenceEngine) -> None:
        """After a reader is cancelled, the engine serves the next one."""
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
        """An idle engine reports no work, and the tokens that it has generated."""
        await self._all(engine, [self._request("r", max_tokens=3)])
        use = await engine.usage()
        assert use.running == use.queued == use.queued_tokens == 0, f"an idle engine must report no work, got {use}"
        assert use.generated_tokens >= 3, f"3 tokens were generated, got {use.generated_tokens}"

    async def follows_the_seed(self, engine: InferenceEngine) -> None:
        """Equal seeds give equal tokens and log-probabilities, alone or among other requests."""
        (alone,) = await self._all(engine, [self._request("alone", seed=5)])
        company = [self._request(f"r{seed}", seed=seed) for seed in range(8)]
        same = next(g for g in await self._all(engine, company) if g.request_id == "r5")
        assert same.response_ids.tolist() == alone.response_ids.tolist(), "equal seeds must give equal tokens"
        assert np.allclose(same.logprobs, alone.logprobs, atol=1e-4), "equal tokens must have equal logprobs"

    async def loads_weights(self, engine: InferenceEngine, published: Published) -> None:
        """A load returns the published checksum. Later tokens carry the new version. A failed load changes nothing."""
        weighted = self._weighted(engine)
        version, expected = published
        held = await weighted.load_weights(self._policy, version)
        assert held == expected, f"the engine must hold what was published: {expected}, got {held}"
        assert (await engine.usage()).version == version, "the version must be stamped"
        (generation,) = await self._all(engine, [self._request("r", max_tokens=2)])
        recorded = generation.versions
        assert recorded == (VersionRun(0, version),), f"version {version} must be recorded: {recorded}"
        try:
            await weighted.load_weights(self._policy, MISSING)
        except (EngineError, KeyError):
            assert (await engine.usage()).version == version, "a failed load must leave the old version"

    async def takes_an_adapter_again(self, engine: InferenceEngine, published: Published) -> None:
        """An adapter applies to the base, not to the previous adapter: loaded twice, it serves the same tokens."""
        weighted, (version, expected) = self._weighted(engine), published
        answers: list[Generation] = []
        for time in (1, 2):
            held = await weighted.load_weights(self._policy, version)
            assert held == expected, f"the engine must hold the adapter and its base: {expected}, got {held}"
            answers += await self._all(engine, [self._request(f"r{time}", seed=4, max_tokens=16)])
        first, second = answers
        once = "an adapter that is loaded twice must serve as if it were loaded once"
        assert first.response_ids.tolist() == second.response_ids.tolist(), once
        assert np.allclose(first.logprobs, second.logprobs, atol=1e-4), once

    async def sleeps(self, engine: InferenceEngine) -> None:
        """A sleeping engine pauses running requests, holds new ones and answers aborts. Awake, it serves the rest."""
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
        late = answers_of(engine, requests)
        reader = asyncio.ensure_future(anext(late))
        for _ in range(100):  # An engine whose tokens take no time needs turns of the event loop.
            await asyncio.sleep(long_enough_s / 100)
        await engine.abort(["aborted"])
        first = await reader
        assert (first.request_id, first.finish) == ("aborted", FinishReason.ABORT), f"an abort must be heard: {first}"
        assert len(first.response_ids) == 0, "an engine that sleeps must not sample"
        await weighted.wake()
        await weighted.wake()
        assert [g.request_id async for g in late] == ["late"], "what came meanwhile must be served after waking up"
        (same,) = await early
        assert len(same.response_ids) == len(alone.response_ids), "sleep must not end what runs"
        if (await engine.capabilities()).continues:
            assert same.response_ids.tolist() == alone.response_ids.tolist(), "sleep must not change what runs"
            assert np.allclose(same.logprobs, alone.logprobs, atol=1e-4), "sleep must not change what runs"

    async def loads_weights_asleep(self, engine: InferenceEngine, published: Published) -> None:
        """An engine can load weights while it sleeps, and serves them when it wakes."""
        weighted = self._weighted(engine)
        await weighted.sleep()
        version, expected = published
        assert await weighted.load_weights(self._policy, version) == expected, "asleep, it must load weights"
        await weighted.wake()
        (generation,) = await self._all(engine, [self._request("r", max_tokens=2)])
        recorded = generation.versions
        assert recorded == (VersionRun(0, version),), f"version {version} must be recorded: {recorded}"

    async def closes(self, engine: InferenceEngine) -> None:
        """Closing ends running requests and may be repeated. Nothing is served afterwards."""
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
        return cast(WeightedEngine, engine)  # Its capabilities claim the method.

    def _request(
        self,
        request_id: str,
        *,
        max_tokens: int = 8,
        seed: int = 1,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        temperature: float = 1.0,
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            policy=self._policy,
            prompt_ids=self._prompt,
            sampling=Sampling(max_tokens=max_tokens, stop=stop, stop_ids=stop_ids, temperature=temperature),
            seed=seed,
        )

    async def _all(self, engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [generation async for generation in answers_of(engine, requests)]
