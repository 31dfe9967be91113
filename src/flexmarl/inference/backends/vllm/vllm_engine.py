"""Engine on vLLM's `AsyncLLM`: requests and answers are token ids, and weights come from the object store.

    generate --> a task per request --> vLLM --> answer
    load     --> all requests end, the weights change, and the requests go on with the tokens that they have

consumes:     requests, aborts, and versions to load
waits for:    vLLM's engine core, and for a load to end before a request goes on
produces:     generations, in completion order, each token with its version
unblocked by: tokens; the end of a load; the watch, when vLLM's own processes are lost
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import numpy as np
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports] - the extra
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMClientError  # pyright: ignore[reportMissingImports]
from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

from flexmarl.errors import EngineError, boundary, described
from flexmarl.inference.backends.embedded.sampler import StopWatch
from flexmarl.inference.backends.vllm.engine_args import vllm_config
from flexmarl.inference.backends.vllm.handed_weights import HandedTree
from flexmarl.inference.backends.vllm.vllm_start import unlink_shared_memory
from flexmarl.inference.calls import joined, rest_of
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.inference.settings import VllmSettings
from flexmarl.objects.interface import Checksum, TensorTree, canary_key, weights_key
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationRequest,
    PolicyName,
    Version,
    VersionRun,
    unserved,
)

T = TypeVar("T")
WATCH_S = 0.25
"""Seconds between two looks at vLLM's processes. A call of a core that has died may never return by itself."""
ABORT_S = 0.05
"""Seconds after which a load aborts again: a request that vLLM was just being given may have missed the first time."""
MOST_CANARY_GAP = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Mean difference of the canary's log-probabilities to the trainer's above which weights are not what was published.
Old weights behind a tied head gave 0.5; right ones in float32 give 1e-6, and rounding of bfloat16 some hundredths."""
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class LoadGauge(StatLoggerBase):
    """vLLM's own account of its load, as of its last step."""

    def __init__(self) -> None:
        self.waiting = 0
        self.kv_use = 0.0
        self.preempted = 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
        """Called by vLLM after each step."""
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.kv_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Says nothing."""


@dataclass(slots=True, eq=False)
class _Open:
    """One request without its answer."""

    request: GenerationRequest
    """The request for the tokens that are still missing."""
    answers: asyncio.Queue[Generation | EngineError]
    part: Generation | None = None
    """The tokens that versions before the present one sampled."""
    in_vllm: bool = False
    over: bool = False
    """True if its caller wants no more tokens."""

    def whole(self, piece: Generation) -> Generation:
        return piece if self.part is None else joined(self.part, piece)

    def keep(self, piece: Generation) -> None:
        self.part, self.request = self.whole(piece), rest_of(self.request, piece)


class VllmEngine:
    """`WeightedEngine` on vLLM. Its requests end before each load and continue after it."""

    def __init__(self, settings: VllmSettings, parts: EngineParts) -> None:
        """Starts vLLM's processes and waits for them, up to a minute. Raises ConfigError that names the key."""
        config = vllm_config(settings, parts)
        self._settings, self._parts, self._policy = settings, parts, parts.policy
        self._gauge = LoadGauge()
        with boundary(EngineError, f"policies.{parts.policy}.engine: starting vLLM"):
            self._llm = AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: self._gauge], disable_log_stats=True)
            unlink_shared_memory()
        self._stops = StopWatch(config.model_config.get_vocab_size(), parts.decode)
        self._version, self._generated = parts.version, 0
        self._open: dict[str, _Open] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._loading = asyncio.Lock()
        self._closed = ""
        self._lost: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        self._require_open()
        answers = asyncio.Queue[Generation | EngineError]()
        refused: list[Generation] = []
        left: set[str] = set()
        for request in requests:
            if problem := self._problem(request):
                refused.append(unserved(request, self._version, FinishReason.ERROR, problem))
                continue
            name = request.request_id
            self._stops.watch(request.sampling)
            self._open[name] = one = _Open(request, answers)
            left.add(name)
            self._tasks[name] = asyncio.create_task(self._serve(one), name=f"vllm {name}")
        try:
            for generation in refused:
                yield generation
            while left:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    raise EngineError(str(answer)) from answer
                left.discard(answer.request_id)
                yield answer
        finally:
            for name in left:
                if one := self._open.pop(name, None):
                    one.over = True
                    self._tasks.pop(name).cancel()  # Its generator tells vLLM.

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests with the tokens that have come. Unknown ids are ignored."""
        if self._closed:
            return
        found = [self._open[name] for name in request_ids if name in self._open]
        for one in found:
            one.over = True
            if not one.in_vllm:  # It waits for a load, or has not begun.
                self._tasks.pop(one.request.request_id).cancel()
                self._answer(one, unserved(one.request, self._version, FinishReason.ABORT))
        if running := [one.request.request_id for one in found if one.in_vllm]:
            await self._llm.abort(running)

    async def usage(self) -> EngineUse:
        """The load. Tokens of running requests are counted when these end."""
        waiting = min(self._gauge.waiting, len(self._open))
        return EngineUse(
            queued=waiting,
            running=len(self._open) - waiting,
            queued_tokens=sum(one.request.sampling.max_tokens for one in self._open.values()),
            kv_use=self._gauge.kv_use,
            preempted=self._gauge.preempted,
            generated_tokens=self._generated,
            version=self._version,
        )

    async def capabilities(self) -> EngineCapabilities:
        """It loads whole weights, and reports the model's own log-probabilities alone."""
        return EngineCapabilities(loads_weights=True, raw_logprobs=True, drawn_logprobs=False)

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Ends what runs, loads the version in vLLM's workers, compares the canary, and lets everything go on.

        Returns the digest that the workers computed. An update that fails half-way leaves torn weights behind, so that
        the engine is lost then.
        """
        self._require_open()
        if policy != self._policy:
            raise EngineError(f"this engine serves policy '{self._policy}', not '{policy}'")
        key = weights_key(policy, version)
        async with self._loading:
            with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
                tree = await self._parts.store.get(key)
                canary = await self._parts.store.get(canary_key(policy, version))
                self._may_go.clear()
                try:
                    await self._drain()
                    held = await self._unless_lost(self._update(tree))
                    await self._unless_lost(self._compare(canary, version))
                except BaseException as error:
                    self._lose(f"loading '{key}' failed half-way: {described(error)}")
                    raise
                self._version = version
                self._may_go.set()
        return held

    async def close(self) -> None:
        """Ends what runs with finish `abort`, and vLLM's processes. A second call does nothing."""
        if not self._closed:
            self._closed = f"the engine of '{self._policy}' is closed"
            for name, one in list(self._open.items()):
                self._tasks.pop(name).cancel()
                self._answer(one, unserved(one.request, self._version, FinishReason.ABORT))
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await asyncio.to_thread(self._llm.shutdown)

    async def _serve(self, one: _Open) -> None:
        """Runs one request to its end, over as many versions as are loaded meanwhile."""
        try:
            while True:
                await self._may_go.wait()
                piece = await self._piece(one.request)
                self._generated += len(piece.response_ids)
                if piece.finish is not FinishReason.ABORT or one.over:
                    break
                one.keep(piece)
        except VLLMClientError as error:
            piece = unserved(one.request, self._version, FinishReason.ERROR, described(error))
        except Exception as error:
            self._lose(described(error))
            return
        self._answer(one, piece)

    async def _piece(self, request: GenerationRequest) -> Generation:
        """Has vLLM sample until the request ends, or until it is aborted. The version does not change meanwhile."""
        name, version, sampling = request.request_id, self._version, request.sampling
        one = self._open[name]
        ids: list[int] = []
        logprobs: list[float] = []
        finish, reused = FinishReason.ABORT, 0
        params = _sampling_params(request, most=self._most_tokens(request))
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"{self._policy}@{version}")
        begun = request.prompt_ids[len(request.prompt_ids) - request.offset :]
        one.in_vllm = True
        answers = self._llm.generate(prompt, params, name)
        try:
            async for output in answers:
                (choice,) = output.outputs
                ids += choice.token_ids
                logprobs += choice.logprobs.logprobs
                reused = output.num_cached_tokens or 0
                if output.finished:
                    finish = _FINISHES.get(choice.finish_reason, FinishReason.ERROR)
                if sampling.stop and (end := self._stopped(request, begun, ids, len(choice.token_ids))):
                    del ids[end:], logprobs[end:]
                    finish = FinishReason.STOP
                    break
        finally:
            one.in_vllm = False
            await answers.aclose()
        values = np.asarray(logprobs, np.float32)
        return Generation(
            request_id=name,
            response_ids=np.asarray(ids, np.int32),
            logprobs=values,
            raw_logprobs=values,
            versions=(VersionRun(0, version),),
            finish=finish,
            reused_tokens=reused,
        )

    def _stopped(self, request: GenerationRequest, begun: np.ndarray, ids: list[int], new: int) -> int:
        """How many of `ids` the response has, if a stop string has come with the `new` last ones; else 0."""
        for end in range(len(ids) - new + 1, len(ids) + 1):
            response = np.concatenate([begun, np.asarray(ids[:end], np.int32)])
            if self._stops.suspects(response[-1:].astype(np.int64)) and self._stops.ended(request.sampling, response):
                return end
        return 0

    async def _drain(self) -> None:
        """Returns when vLLM has no request any more. vLLM's core fails if weights change under a request."""
        while running := [one.request.request_id for one in self._open.values() if one.in_vllm]:
            await self._unless_lost(self._llm.abort(running))
            await asyncio.sleep(ABORT_S)

    async def _update(self, tree: TensorTree) -> Checksum:
        handed = HandedTree(tree)
        with await self._parts.thread.run(handed.__enter__):
            await self._llm.start_weight_update()
            await self._llm.update_weights(
                WeightTransferUpdateRequest({"address": handed.address, "verify": self._parts.verify})
            )
            await self._llm.finish_weight_update()
        digests = set(await self._llm.collective_rpc("flexmarl_digest"))
        if len(digests) != 1 or "" in digests:
            raise EngineError(f"vLLM's workers have loaded different weights: {sorted(digests)}")
        return Checksum(digests.pop())

    async def _compare(self, canary: TensorTree, version: Version) -> None:
        """Compares log-probabilities with the trainer's: a digest cannot show what vLLM computes with."""
        ids, theirs = canary["ids"].tolist(), canary["logprobs"].numpy()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        prompt = tokens_input(ids, cache_salt=f"{self._policy}@{version}")
        ours = np.zeros(0)
        async for output in self._llm.generate(prompt, params, f"canary {version}"):
            if output.prompt_logprobs is not None:
                ours = np.asarray(output.prompt_logprobs.logprobs)
        gap, most = float(np.abs(ours - theirs).mean()), MOST_CANARY_GAP[self._settings.dtype]
        if not gap <= most:
            raise EngineError(
                f"the canary's log-probabilities differ by {gap:.2g} on average from the trainer's, at most {most:g} "
                "is allowed: vLLM does not compute with the weights that were published"
            )

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises EngineError as soon as vLLM is lost, even if `work` never returns."""
        lost = self._watch()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, lost], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineError(self._closed)
        finally:
            task.cancel()

    def _watch(self) -> asyncio.Future[None]:
        """The future that is done when vLLM is lost. A task looks for that while there is work."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        if self._watching is None:
            self._watching = asyncio.create_task(self._look(), name=f"watch vllm of {self._policy}")
        return self._lost

    async def _look(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(WATCH_S)
        self._lose("vLLM's engine core ended, or failed")

    def _lose(self, because: str) -> None:
        """Ends every request with an error, once. The engine serves nothing any more."""
        if self._closed:
            return
        self._closed = f"the engine of '{self._policy}' is lost: {because}"
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        failure = EngineError(self._closed)
        for answers in {id(one.answers): one.answers for one in self._open.values()}.values():
            answers.put_nowait(failure)
        self._open.clear()
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks.clear()

    def _answer(self, one: _Open, piece: Generation) -> None:
        if self._open.pop(piece.request_id, None) is not None:
            self._tasks.pop(piece.request_id, None)
            one.answers.put_nowait(one.whole(piece))

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError(self._closed)
        with suppress(RuntimeError):
            self._watch()

    def _most_tokens(self, request: GenerationRequest) -> int:
        return min(request.sampling.max_tokens, self._settings.max_len - len(request.prompt_ids))

    def _problem(self, request: GenerationRequest) -> str:
        if request.policy != self._policy:
            return f"this engine serves policy '{self._policy}', not '{request.policy}'"
        if request.request_id in self._open:
            return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
        if not 1 <= len(request.prompt_ids) < self._settings.max_len:
            key = f"policies.{self._policy}.engine.max_len"
            return (
                f"the prompt must have 1 to {self._settings.max_len - 1} tokens ({key}), got {len(request.prompt_ids)}"
            )
        return self._stops.refuse(request.sampling)


def _sampling_params(request: GenerationRequest, *, most: int) -> SamplingParams:
    sampling = request.sampling
    return SamplingParams(
        max_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=_seed(request),
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # What ends a response is in `stop_ids`.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # Stop strings are looked for here, token by token: they may begin in tokens that another version sampled.
        output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def _seed(request: GenerationRequest) -> int:
    """vLLM's generator of a request begins at its first token, so each continuation has a stream of its own."""
    text = f"{request.seed}/{request.offset}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
