"""Embedded engine on a device thread: the synchronous core behind `inference/interface.py`.

    generate, abort --> inbox --> one pass at a time --> each call's answers
    load            --> the same thread, between passes

consumes:     requests and aborts, handed over once per pass
waits for:    the device thread, shared with a trainer of the same process
produces:     generations, a batch per pass
unblocked by: a request; the pump task exists only while there is work
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.torch_device import with_threads
from flexmarl.errors import EngineError, boundary
from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.backends.embedded.sampler import Decode
from flexmarl.inference.interface import FIRST_VERSION, EngineCapabilities, EngineParts
from flexmarl.inference.settings import EmbeddedSettings, EngineSettings
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, TensorTree, weights_key
from flexmarl.objects.settings import Verify
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationProgress,
    GenerationRequest,
    PolicyName,
    Version,
    unserved,
)

_Answers = asyncio.Queue[Generation | GenerationProgress | EngineError]
_Arrival = GenerationRequest | tuple[str, ...]
"""A request, or the ids of requests to abort."""


class _Callers:
    """Callers that wait for answers, by the id of their request.

    An id may come again as soon as its caller has left, before the core has ended the first request of that id: the
    core takes requests and aborts in their order, so what it answers under an id first belongs to the first.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, _Answers] = {}
        self._left: Counter[str] = Counter()
        """Number of requests by id that the core still ends, and whose callers have left."""

    def join(self, request_id: str, answers: _Answers) -> None:
        self.waiting[request_id] = answers

    def leave(self, request_ids: Iterable[str], answers: _Answers) -> list[str]:
        """Whoever reads `answers` waits for these requests no longer. Returns those that the core has not ended."""
        open_ids = [request_id for request_id in request_ids if self.waiting.get(request_id) is answers]
        for request_id in open_ids:
            del self.waiting[request_id]
        self._left.update(open_ids)
        return open_ids

    def answer(self, parts: Iterable[Generation | GenerationProgress]) -> None:
        """Hands over what the core has answered; a Generation is the last of its request."""
        for part in parts:
            request_id, ends = part.request_id, isinstance(part, Generation)
            if self._left[request_id]:
                self._left.subtract([request_id] if ends else [])
                self._left = +self._left
            elif (answers := self.waiting.get(request_id)) is not None:
                answers.put_nowait(part)
                if ends:
                    del self.waiting[request_id]

    def fail(self, failure: EngineError) -> None:
        """The core answers nothing any more."""
        for answers in set(self.waiting.values()):
            answers.put_nowait(failure)
        self.waiting.clear()
        self._left.clear()


class EmbeddedEngine:
    """`WeightedEngine` in this process. Close it, or use it as an async context manager."""

    def __init__(
        self,
        make_model: Callable[[], torch.nn.Module],
        settings: EmbeddedSettings,
        *,
        policy: PolicyName,
        store: ObjectStore,
        thread: DeviceThread,
        device: str = "cpu",
        sharing: int = 1,
        deterministic: bool = False,
        decode: Decode | None = None,
        version: Version = FIRST_VERSION,
        verify: Verify = "full",
        architecture: str = "",
        other: Callable[[PolicyName], tuple[EngineSettings, EngineParts]] | None = None,
    ) -> None:
        """The engine owns the model from here on. `decode` (ids to text) is needed for stop strings only.

        The others are those of `EngineParts`: without `other` the engine serves its policy only.
        """
        core = EngineCore(
            make_model(),
            settings,
            device=device,
            sharing=sharing,
            deterministic=deterministic,
            decode=decode,
            version=version,
            verify=verify,
        )
        self._core: EngineCore | None = core
        self._settings, self._policy, self._store, self._thread = settings, policy, store, thread
        self._architecture, self._other = architecture, other
        self._inbox: list[_Arrival] = []
        """In their order: an abort is not that of a later request with the same id."""
        self._callers = _Callers()
        self._pump_task: asyncio.Task[None] | None = None
        self._use = core.use()
        self._tokens_per_s = 0.0
        self._closed = ""
        self._verify: Verify = verify
        self._changing = asyncio.Lock()
        """Held while weights are loaded or moved, which may put other tensors into the model."""
        self._capabilities = EngineCapabilities(
            loads_weights=True,
            sleeps=True,
            deterministic=deterministic,
            continues=True,
            raw_logprobs=True,
            adapters=True,
        )

    async def __aenter__(self) -> "EmbeddedEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order; progress of those that stream after every turn."""
        if self._closed:
            raise EngineError(self._closed)
        answers: _Answers = asyncio.Queue()
        left: set[str] = set()
        refused: list[Generation] = []
        for request in requests:
            problem = self._problem(request)
            if problem:
                refused.append(unserved(request, self._use.version, FinishReason.ERROR, problem))
            else:
                left.add(request.request_id)
                self._callers.join(request.request_id, answers)
                self._inbox.append(request)
        try:
            if left:
                self._go_on()
            for generation in refused:
                yield generation
            while left:
                answer = await answers.get()
                if isinstance(answer, EngineError):
                    left.clear()
                    raise EngineError(str(answer)) from answer
                if isinstance(answer, Generation):
                    left.discard(answer.request_id)
                yield answer
        finally:
            await self.abort(self._callers.leave(left, answers))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests before the next pass, at most `steps_per_turn` decode steps away."""
        if request_ids and not self._closed:
            self._inbox.append(tuple(request_ids))
            self._go_on()

    async def usage(self) -> EngineUse:
        """The load after the last pass, with what has arrived since."""
        new = [one.sampling.max_tokens for one in self._inbox if isinstance(one, GenerationRequest)]
        return replace(
            self._use,
            queued=self._use.queued + len(new),
            queued_tokens=self._use.queued_tokens + sum(new),
            tokens_per_s=self._tokens_per_s,
        )

    async def capabilities(self) -> EngineCapabilities:
        """Claims everything; `deterministic` as it was made."""
        return self._capabilities

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Gets the version and swaps the weights between two passes, also in the middle of requests.

        Weights of another policy make the engine that policy's, which it may become only without requests. Returns the
        checksum of what is served.
        """
        core = self._open_core()
        key = weights_key(policy, version)
        with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
            async with self._changing:
                await self._get_back(core, on_device=False)
                if policy != self._policy:
                    return await self._become(policy, version, core)
                held = await self._load(core, version, key)
        self._use = replace(self._use, version=version)
        return held

    async def _become(self, policy: PolicyName, version: Version, core: EngineCore) -> Checksum:
        """Serves another policy from now on: with the same model if that takes the weights, else with a new one."""
        if self._other is None:
            raise EngineError(f"this engine serves policy '{self._policy}', not '{policy}'")
        settings, parts = await self._thread.run(self._other, policy)
        if not isinstance(settings, EmbeddedSettings):
            raise EngineError(
                f"policies.{policy}.engine.type is '{settings.type}'; only an embedded engine can become it"
            )
        tree = await self._store.get(weights_key(policy, version))
        same = self._architecture == parts.architecture != "" and self._settings == settings
        while self._pump_task and not self._pump_task.done() and not self._callers.waiting:  # It aborts what was left.
            await asyncio.wait([self._pump_task])
        if self._callers.waiting or not core.idle:
            raise EngineError(f"this engine has requests of '{self._policy}'; they must end first")
        self._policy, self._core = policy, None  # Two models at a time may not fit on the device.
        try:
            self._core, held = await self._thread.run(_adopt, core, same, settings, parts, version, tree)
        except BaseException:
            self._closed = self._closed or f"the engine of '{policy}' was not made: it has no model any more"
            raise
        self._settings, self._architecture = settings, parts.architecture
        self._use = replace(self._core.use(), version=version)
        self._go_on()
        return held

    async def sleep(self) -> None:
        """Sleeps between two passes. Later passes only take requests and aborts, until `wake`.

        Weights that the object store has are kept nowhere here; others, as a base with its adapter, in host memory.
        """
        async with self._changing:
            await self._thread.run(self._open_core().sleep, give_up=True)

    async def wake(self) -> None:
        """Resumes the requests that `sleep` paused. Weights that were given up come from the object store."""
        async with self._changing:
            core = self._open_core()
            with boundary(EngineError, f"waking the engine of '{self._policy}'"):
                await self._get_back(core, on_device=True)
            await self._thread.run(core.wake)
        self._go_on()

    async def close(self) -> None:
        """Ends running requests with finish `abort`, and releases the model."""
        if not self._closed:
            self._closed = f"the engine of '{self._policy}' is closed"
            self._go_on()
        if self._pump_task is not None:
            await asyncio.wait([self._pump_task])  # `wait`, because awaiting the task would cancel it with the caller.
        self._core = None

    async def _get_back(self, core: EngineCore, *, on_device: bool) -> None:
        """Gets the weights that `sleep` gave up, if it did."""
        if not core.lacks_weights:
            return
        key = weights_key(self._policy, core.version)
        model = await self._thread.run(partial(core.made_again, on_device=on_device))
        try:
            await self._store.get_into(
                key, model, verify=self._verify, run=lambda fill: self._thread.run(core.refill, fill)
            )
        except ValueError:  # The layout differs. Nothing was written.
            tree = await self._store.get(key)
            await self._thread.run(core.refill, lambda: core.copied(tree))

    async def _load(self, core: EngineCore, version: Version, key: ObjectKey) -> Checksum:
        """Copies whole weights straight into the model; gets an adapter, or weights in another layout, by itself."""
        if model := await self._thread.run(core.weights):
            with suppress(ValueError):  # The layout differs. Nothing was written.
                return await self._store.get_into(
                    key, model, verify=self._verify, run=lambda f: self._thread.run(core.load_in_place, version, f)
                )
        tree = await self._store.get(key)
        return await self._thread.run(core.load, version, tree)

    def _open_core(self) -> EngineCore:
        if self._closed or self._core is None:
            raise EngineError(self._closed)
        return self._core

    def _problem(self, request: GenerationRequest) -> str:
        if request.policy != self._policy:
            return f"this engine serves policy '{self._policy}', not '{request.policy}'"
        if request.request_id in self._callers.waiting:
            return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
        return ""

    def _go_on(self) -> None:
        if self._core is None:  # It is becoming another policy's, and goes on then.
            return
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump(), name=f"engine-{self._policy}")

    async def _pump(self) -> None:
        """Runs passes on the device thread until there is nothing to do; a failed pass fails every request."""
        clock, core = asyncio.get_running_loop().time, self._core
        assert core is not None
        try:
            busy = True
            while busy and not self._closed:
                began, before = clock(), self._use.generated_tokens
                inbox, self._inbox = self._inbox, []
                done, streamed, self._use = await self._thread.run(_pass, core, inbox, self._settings)
                self._tokens_per_s = (self._use.generated_tokens - before) / max(clock() - began, 1e-9)
                self._callers.answer([*streamed, *done])
                left = not core.asleep and (self._use.queued or self._use.running)
                busy = bool(left or self._inbox)
            if self._closed:
                self._callers.answer(await self._thread.run(_drain, core, self._inbox))
        except Exception as error:
            self._closed = f"the engine of '{self._policy}' failed: {type(error).__name__}: {error}"
            failure = EngineError(self._closed)
            failure.__cause__ = error
            self._callers.fail(failure)


def _pass(
    core: EngineCore, inbox: Sequence[_Arrival], settings: EmbeddedSettings
) -> tuple[list[Generation], list[GenerationProgress], EngineUse]:
    """Takes commands and decodes a few steps, on the device thread; stops early to deliver if no request waits, or if
    one that streams has its first token."""
    done = _take_in(core, inbox)
    with with_threads(settings.threads):
        for _ in range(settings.steps_per_turn):
            if core.idle or (done and not core.waiting) or core.has_news:
                break
            done += core.step()
    return done, core.progress(), core.use()


def _take_in(core: EngineCore, inbox: Sequence[_Arrival]) -> list[Generation]:
    """Takes requests and aborts in their order; returns what has ended."""
    done: list[Generation] = []
    for arrival in inbox:
        if isinstance(arrival, tuple):
            done += core.abort(arrival)
        elif (refused := core.add(arrival)) is not None:
            done.append(refused)
    return done


def _drain(core: EngineCore, inbox: Sequence[_Arrival]) -> list[Generation]:
    """Ends every request, on the device thread."""
    return _take_in(core, inbox) + core.abort()


def _adopt(
    core: EngineCore, same: bool, settings: EmbeddedSettings, parts: EngineParts, version: Version, tree: TensorTree
) -> tuple[EngineCore, Checksum]:
    """Loads another policy's weights into the core if it has the `same` architecture, else into a new one."""
    if same:
        with suppress(EngineError):  # The other policy's adapter is of another base than the weights that are held.
            held = core.load(version, tree)
            core.decode_with(parts.decode)
            return core, held
    core.release()
    core = EngineCore(
        parts.make_model(),
        settings,
        device=parts.device,
        sharing=parts.sharing,
        deterministic=parts.deterministic,
        decode=parts.decode,
        version=version,
        verify=parts.verify,
    )
    return core, core.load(version, tree)


def make_engine(settings: EmbeddedSettings, parts: EngineParts) -> EmbeddedEngine:
    """The factory that `EmbeddedSettings.factory` names."""
    return EmbeddedEngine(
        parts.make_model,
        settings,
        policy=parts.policy,
        store=parts.store,
        thread=parts.thread,
        device=parts.device,
        sharing=parts.sharing,
        deterministic=parts.deterministic,
        decode=parts.decode,
        version=parts.version,
        verify=parts.verify,
        architecture=parts.architecture,
        other=parts.other,
    )
