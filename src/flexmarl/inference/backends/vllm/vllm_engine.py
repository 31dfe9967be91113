"""Engine on vLLM's `AsyncLLM`: requests and answers are token ids, and weights come from the object store.

    generate         --> a task per request --> vLLM --> answer
    load of weights  --> all requests end, the weights change, and the requests go on with the tokens that they have
    load of adapter  --> requests run on, each under its version; those of a version that goes go on under the newest
    sleep            --> all requests end, and go on with `wake`, which also loads what was published until then

consumes:     requests, aborts, and versions to load
waits for:    vLLM's engine core, and for a load to end before a request goes on
produces:     generations, in completion order, each token with its version
unblocked by: tokens; the end of a load; the watch, when vLLM's own processes are lost
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import TypeVar

import numpy as np
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports] - the extra
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMClientError  # pyright: ignore[reportMissingImports]
from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

from flexmarl.errors import EngineError, boundary, described
from flexmarl.inference.backends.embedded.sampler import StopWatch
from flexmarl.inference.backends.vllm.engine_args import vllm_config
from flexmarl.inference.backends.vllm.handed_weights import HandedTree, handed_adapter
from flexmarl.inference.backends.vllm.served_versions import Served, ServedVersions
from flexmarl.inference.backends.vllm.vllm_requests import OpenRequest, adapter_of, sampling_params
from flexmarl.inference.backends.vllm.vllm_start import sockets_in_a_folder, unlink_shared_memory
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.inference.settings import VllmSettings
from flexmarl.objects.interface import (
    Checksum,
    PublishedAdapter,
    TensorTree,
    canary_key,
    checksum,
    names_checksum,
    weights_key,
)
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
        self.computed = 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
        """Called by vLLM after each step."""
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.kv_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs
            self.computed += iteration_stats.prompt_token_stats.computed

    def log_engine_initialized(self) -> None:
        """Says nothing."""


class VllmEngine:
    """`WeightedEngine` on vLLM. Its requests end before each load and continue after it."""

    def __init__(self, settings: VllmSettings, parts: EngineParts) -> None:
        """Starts vLLM's processes and waits for them, up to a minute. Raises ConfigError that names the key."""
        self._settings, self._parts, self._policy = settings, parts, parts.policy
        self._gauge = LoadGauge()
        self._llm = self._started()
        self._stops = StopWatch(self._llm.model_config.get_vocab_size(), parts.decode)
        self._versions = self._at_the_base((parts.policy, *parts.together))
        self._asleep = False
        self._held: dict[PolicyName, tuple[Version, Checksum]] = {}
        """The newest version of each policy that was loaded, or is to be loaded by `wake`, and its digest."""
        self._adapters = count(1)
        self._generated = 0
        self._open: dict[str, OpenRequest] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._loading = asyncio.Lock()
        self._closed = ""
        self._lost: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def _started(self) -> AsyncLLM:
        parts = self._parts
        config = vllm_config(self._settings, parts)
        with boundary(EngineError, f"policies.{parts.policy}.engine: starting vLLM"), sockets_in_a_folder():
            llm = AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: self._gauge], disable_log_stats=True)
            unlink_shared_memory()
        return llm

    def _at_the_base(self, policies: Iterable[PolicyName]) -> ServedVersions:
        kept = self._parts.versions if self._settings.adapters else 1
        return ServedVersions(policies, self._parts.version, kept=kept)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order; progress of those that stream at every step."""
        self._require_open()
        answers = asyncio.Queue[Generation | GenerationProgress | EngineError]()
        refused: list[Generation] = []
        left: dict[str, OpenRequest] = {}
        for request in requests:
            if problem := self._problem(request):
                refused.append(unserved(request, self._version_of(request), FinishReason.ERROR, problem))
                continue
            name = request.request_id
            self._stops.watch(request.sampling)
            self._open[name] = left[name] = one = OpenRequest(request, answers)
            self._tasks[name] = asyncio.create_task(self._serve(one), name=f"vllm {name}")
        try:
            for generation in refused:
                yield generation
            while left:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    raise EngineError(str(answer)) from answer
                if isinstance(answer, Generation):
                    left.pop(answer.request_id, None)
                yield answer
        finally:
            for name, one in left.items():
                if self._open.get(name) is one:  # Not a later request of the same id.
                    one.over = True
                    del self._open[name]
                    self._tasks.pop(name).cancel()  # Its generator ends it in vLLM.

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests with the tokens that have come. Unknown ids are ignored."""
        if self._closed:
            return
        found = [self._open[name] for name in request_ids if name in self._open]
        for one in found:
            waits, one.over = one.under is None and not one.over, True
            if waits:  # For a load, or it has not begun. One that was aborted before may wait for a sign of the core.
                self._tasks.pop(one.request.request_id).cancel()
                self._answer(one, unserved(one.request, self._version_of(one.request), FinishReason.ABORT))
        if running := [one.request.request_id for one in found if one.under is not None]:
            await self._llm.abort(running)

    async def usage(self) -> EngineUse:
        """The load of all its policies, and the newest version of the first one.

        Tokens of running requests are counted when these end.
        """
        waiting = min(self._gauge.waiting, len(self._open))
        return EngineUse(
            queued=waiting,
            running=len(self._open) - waiting,
            queued_tokens=sum(one.request.sampling.max_tokens for one in self._open.values()),
            kv_use=self._gauge.kv_use,
            preempted=self._gauge.preempted,
            generated_tokens=self._generated,
            prompt_tokens=self._gauge.computed,
            version=self._versions.newest(self._policy).version,
        )

    async def capabilities(self) -> EngineCapabilities:
        """It loads whole weights, or adapters, and reports the model's own log-probabilities alone."""
        adapters = self._settings.takes_adapters
        return EngineCapabilities(
            loads_weights=True, sleeps=True, raw_logprobs=True, drawn_logprobs=False, adapters=adapters
        )

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Loads a version in vLLM's workers, and compares its canary. Returns the digest that the workers computed.

        Whole weights: what runs ends first, and goes on afterwards. An update that fails half-way leaves torn weights
        behind, so that the engine is lost then. An adapter: nothing waits, and one that fails is not served. Weights of
        another policy on the same model make the engine that policy's, which it may become only without requests.
        """
        self._require_open()
        key = weights_key(policy, version)
        async with self._loading:
            await self._check_policy(policy)
            with boundary(EngineError, f"loading '{key}' into the engine of '{self._policy}'"):
                tree = await self._parts.store.get(key)
                canary = await self._parts.store.get(canary_key(policy, version))
                adapter = PublishedAdapter.from_tree(tree)
                if (adapter is not None) != self._settings.takes_adapters:
                    raise EngineError(_unfit(adapter))
                if self._asleep:  # `wake` proves that vLLM has loaded it.
                    held = checksum(tree) if self._parts.verify == "full" else names_checksum(tree)
                elif adapter is None:
                    held = await self._load_whole(tree, canary, Served(policy, version))
                else:
                    held = await self._load_adapter(adapter, canary, policy, version)
                self._held[policy] = version, held
                return held

    async def sleep(self) -> None:
        """Ends what runs, which goes on after `wake`, and frees the device: weights are in host memory then.

        On a CPU vLLM cannot sleep: its processes end, and `wake` starts others.
        """
        self._require_open()
        async with self._loading:
            if self._asleep:
                return
            self._may_go.clear()
            await self._drain(lambda _: True)
            while any(one.over for one in self._open.values()):  # noqa: ASYNC110 - they wait for a sign of the core
                await asyncio.sleep(ABORT_S)
            self._asleep = True
            if self._parts.device == "cpu":
                await self._end_processes()
            else:
                await self._unless_lost(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Takes the device again, loads the newest version of each policy that it lacks, and resumes requests."""
        self._require_open()
        if not self._asleep:
            return
        with boundary(EngineError, f"waking the engine of '{self._policy}'"):
            if self._parts.device == "cpu":
                # On a thread that stays: vLLM's processes end with the one that began them.
                await self._parts.thread.run(self._start_again)
                self._versions = self._at_the_base(self._versions.policies)
            else:
                await self._unless_lost(self._llm.wake_up())
            self._asleep = False
            for policy, (version, promised) in list(self._held.items()):
                if self._versions.newest(policy).version == version:
                    continue
                if (held := await self.load_weights(policy, version)) != promised:
                    raise EngineError(f"version {version} of '{policy}' had checksum {promised}, but came as {held}")
        self._may_go.set()

    def _start_again(self) -> None:
        """Starts vLLM's processes, and ends them if the engine was closed in that time."""
        self._llm = self._started()
        if self._closed:
            self._llm.shutdown()

    async def _load_whole(self, tree: TensorTree, canary: TensorTree, new: Served) -> Checksum:
        self._may_go.clear()
        try:
            await self._drain(lambda _: True)
            held = await self._unless_lost(self._update(tree))
            await self._unless_lost(self._compare(canary, new))
        except BaseException as error:
            self._lose(f"loading '{weights_key(new.policy, new.version)}' failed half-way: {described(error)}")
            raise
        if new.policy != self._policy:
            self._policy, self._versions = new.policy, ServedVersions([new.policy], new.version, kept=1)
            self._held.clear()
        self._versions.serve(new)
        self._may_go.set()
        return held

    async def _check_policy(self, policy: PolicyName) -> None:
        """Raises EngineError unless it serves the policy, or can by loading its weights."""
        if policy in self._versions.policies:
            return
        other, settings, parts = self._parts.other, None, self._parts
        if other is not None and not self._settings.takes_adapters:
            settings, parts = await self._parts.thread.run(other, policy)
        if settings != self._settings or parts.source != self._parts.source:
            raise EngineError(self._not_served(policy))
        if self._open:
            raise EngineError(f"this engine has requests of '{self._policy}'; they must end first")

    async def _load_adapter(
        self, adapter: PublishedAdapter, canary: TensorTree, policy: PolicyName, version: Version
    ) -> Checksum:
        with handed_adapter(adapter) as folder:
            new = Served(policy, version, next(self._adapters), folder)
            try:
                await self._unless_lost(self._llm.add_lora(adapter_of(new)))
                held = self._agreed(
                    await self._unless_lost(
                        self._llm.collective_rpc("flexmarl_adapter_digest", args=(str(folder), self._parts.verify))
                    )
                )
                await self._unless_lost(self._compare(canary, new))
            except Exception:  # Who cancels it, because the core hangs, must not wait for the core.
                if not self._closed:
                    await self._unless_lost(self._llm.remove_lora(new.adapter))
                raise
        for old in self._versions.serve(new):
            await self._drain(lambda under, old=old: under is old)
            if old.adapter:
                await self._unless_lost(self._llm.remove_lora(old.adapter))
        return held

    async def close(self) -> None:
        """Ends what runs with finish `abort`, and vLLM's processes. A second call does nothing."""
        if not self._closed:
            self._end(f"the engine of '{self._policy}' is closed")
            for name, one in list(self._open.items()):
                self._tasks.pop(name).cancel()
                self._answer(one, unserved(one.request, self._version_of(one.request), FinishReason.ABORT))
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await self._end_processes()

    async def _end_processes(self) -> None:
        """Ends vLLM's processes. Its reader of results goes first: it would report their end as a failure."""
        if (reader := self._llm.output_handler) is not None:
            reader.cancel()
        await asyncio.to_thread(self._llm.shutdown)

    async def _serve(self, one: OpenRequest) -> None:
        """Runs one request to its end, over as many versions as are loaded until then."""
        try:
            while True:
                await self._may_go.wait()
                piece = await self._piece(one.request)
                self._generated += len(piece.response_ids)
                if piece.finish is not FinishReason.ABORT or one.over:
                    break
                one.keep(piece)
            if piece.finish is FinishReason.ABORT:
                # vLLM answers an abort by itself, even if its core hangs. The pool must notice that: the core answers.
                await self._llm.is_sleeping()
        except VLLMClientError as error:
            piece = unserved(one.request, self._version_of(one.request), FinishReason.ERROR, described(error))
        except Exception as error:
            self._lose(described(error))
            return
        self._answer(one, piece)

    async def _piece(self, request: GenerationRequest) -> Generation:
        """Has vLLM sample until the request ends, or until it is aborted, all under one version."""
        name, served, sampling = request.request_id, self._versions.newest(request.policy), request.sampling
        one = self._open[name]
        one.streamed = 0
        ids: list[int] = []
        logprobs: list[float] = []
        finish, reused = FinishReason.ABORT, 0
        most = min(request.sampling.max_tokens, self._settings.max_len - len(request.prompt_ids))
        params = sampling_params(request, most=most)
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=served.salt)
        begun = request.prompt_ids[len(request.prompt_ids) - request.offset :]
        one.under = served
        answers = self._llm.generate(prompt, params, name, lora_request=adapter_of(served))
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
                if request.streams and not output.finished:
                    one.stream(ids, logprobs, served.version)
        finally:
            one.under = None
            await answers.aclose()
        if request.streams and finish is FinishReason.ABORT and not one.over:  # Another version goes on behind these.
            one.stream(ids, logprobs, served.version)
        values = np.asarray(logprobs, np.float32)
        return Generation(
            request_id=name,
            response_ids=np.asarray(ids, np.int32),
            logprobs=values,
            raw_logprobs=values,
            versions=(VersionRun(0, served.version),),
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

    async def _drain(self, goes: Callable[[Served], bool]) -> None:
        """Returns when vLLM has no request under the versions that go. It would fail if these went first."""
        while running := [
            one.request.request_id for one in self._open.values() if one.under is not None and goes(one.under)
        ]:
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
        return self._agreed(await self._llm.collective_rpc("flexmarl_digest"))

    def _agreed(self, found: Sequence[str]) -> Checksum:
        """The digest that all workers have found."""
        digests = set(found)
        if len(digests) != 1 or "" in digests:
            raise EngineError(f"vLLM's workers have loaded different weights: {sorted(digests)}")
        return Checksum(digests.pop())

    async def _compare(self, canary: TensorTree, new: Served) -> None:
        """Compares log-probabilities with the trainer's: a digest cannot show what vLLM computes with."""
        ours, theirs = await self._next_logprobs(canary["ids"].tolist(), new), canary["logprobs"].numpy()
        gap, most = float(np.abs(ours - theirs).mean()), MOST_CANARY_GAP[self._settings.dtype]
        if not gap <= most:
            raise EngineError(
                f"the canary's log-probabilities differ by {gap:.2g} on average from the trainer's, at most {most:g} "
                "is allowed: vLLM does not compute with the weights that were published"
            )

    async def _next_logprobs(self, ids: list[int], new: Served) -> np.ndarray:
        """[N] log-probability of each of the ids as the next one after all of them. Does not wait for what waits.

        Of the next token, since vLLM takes the adapters of other requests for a prompt's log-probabilities.
        """
        params = SamplingParams(max_tokens=1, logprob_token_ids=ids, flat_logprobs=True, detokenize=False)
        name, prompt = f"canary {new.salt}#{new.adapter}", tokens_input(ids, cache_salt=new.salt)
        found = np.full(len(ids), np.nan)
        async for output in self._llm.generate(prompt, params, name, lora_request=adapter_of(new), priority=-1):
            found = np.asarray(output.outputs[0].logprobs.logprobs[1:])  # The first is that of the sampled token.
        return found

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
        while self._asleep or not self._llm.errored:  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(WATCH_S)
        self._lose("vLLM's engine core ended, or failed")

    def _lose(self, because: str) -> None:
        """Ends every request with an error, once. The engine serves nothing any more."""
        if self._closed:
            return
        self._end(f"the engine of '{self._policy}' is lost: {because}")
        failure = EngineError(self._closed)
        for answers in {id(one.answers): one.answers for one in self._open.values()}.values():
            answers.put_nowait(failure)
        self._open.clear()
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks.clear()

    def _end(self, because: str) -> None:
        """Nothing is served from now on, and who waits for the core waits no more."""
        self._closed = because
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    def _answer(self, one: OpenRequest, piece: Generation) -> None:
        if self._open.pop(piece.request_id, None) is not None:
            self._tasks.pop(piece.request_id, None)
            one.answers.put_nowait(one.whole(piece))

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError(self._closed)
        self._watch()

    def _not_served(self, policy: PolicyName) -> str:
        names = " and ".join(f"'{name}'" for name in self._versions.policies)
        return f"this engine serves policy {names}, not '{policy}'"

    def _version_of(self, request: GenerationRequest) -> Version:
        """The version that a request without tokens gets."""
        policy = request.policy if request.policy in self._versions.policies else self._policy
        return self._versions.newest(policy).version

    def _problem(self, request: GenerationRequest) -> str:
        if request.policy not in self._versions.policies:
            return self._not_served(request.policy)
        if request.request_id in self._open:
            return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
        if not 1 <= len(request.prompt_ids) < self._settings.max_len:
            key = f"policies.{self._policy}.engine.max_len"
            return (
                f"the prompt must have 1 to {self._settings.max_len - 1} tokens ({key}), got {len(request.prompt_ids)}"
            )
        return self._stops.refuse(request.sampling)


def _unfit(adapter: PublishedAdapter | None) -> str:
    if adapter is None:
        return "these are whole weights, but the engine has room for adapters alone; use engine.adapters=null"
    rank = max(a.shape[0] for a, _ in adapter.layers.values())
    return f"this is an adapter, for which the engine has no room; use engine.adapters={{max_rank: {rank}}}"
