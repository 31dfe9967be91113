"""Runs requests on the instances of each policy.

    act, act, act --> one tick's requests --> router --> instance 0 | instance 1 | ...
                              ^                               |
                              `---- unfinished ones of a lost instance

consumes:     single requests, from any number of tasks
waits for:    the instances
produces:     one Generation per request, whatever happens to instances
unblocked by: an answer, a timeout, or the loss of an instance
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.interface import WeightedEngine
from flexmarl.inference.routing import Router
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import EngineUse, FinishReason, Generation, GenerationRequest, PolicyName, Version, VersionRun


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way, and who waits for it."""

    request: GenerationRequest
    answer: asyncio.Future[Generation]
    instance: str = ""


@dataclass(slots=True, eq=False)
class _Instance:
    """One live replica and the readers of its answers."""

    name: str
    policy: PolicyName
    engine: WeightedEngine
    version: Version = field(default=FIRST_VERSION)
    readers: set[asyncio.Task[None]] = field(default_factory=set)


class InferencePool:
    """All instances of all policies behind one call. An async context manager: leaving it ends its readers.

    It does not own the engines: who made them closes them.
    """

    def __init__(
        self,
        instances: Mapping[PolicyName, Sequence[WeightedEngine]],
        settings: PoolSettings | None = None,
    ) -> None:
        """Instances are named `{policy}/{number}`."""
        self._settings = settings or PoolSettings()
        self._instances = {
            f"{policy}/{number}": _Instance(f"{policy}/{number}", policy, engine)
            for policy, engines in instances.items()
            for number, engine in enumerate(engines)
        }
        self._routers = {
            policy: Router(f"{policy}/{number}" for number in range(len(engines)))
            for policy, engines in instances.items()
        }
        self._pending: list[_Call] = []
        self._tasks: asyncio.TaskGroup | None = None
        self.lost: dict[str, str] = {}
        """Why each deregistered instance was given up."""
        self.on_lost: Callable[[str, str], None] = lambda instance, because: None
        """Told of every instance that is given up, and why."""

    async def __aenter__(self) -> "InferencePool":
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        for instance in self._instances.values():
            for reader in instance.readers:
                reader.cancel()
        await tasks.__aexit__(None, None, None)

    async def generate(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """The answer to one request; after `timeout_s` it is aborted and comes back as it is, with finish `abort`.

        Cancelling the caller aborts the request. Raises EngineError when no instance of the policy is left.
        """
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._enqueue([call])
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(call.answer)
            await self._abort(call)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.abort_grace_s):
                    return await asyncio.shield(call.answer)
            call.answer.cancel()
            return self._nothing(call)
        except asyncio.CancelledError:
            call.answer.cancel()
            if self._tasks is not None:
                self._tasks.create_task(self._abort(call), name=f"abort-{request.request_id}")
            raise

    async def load_weights(
        self, policy: PolicyName, version: Version, key: ObjectKey, expected: Checksum | None = None
    ) -> dict[str, Checksum]:
        """Every instance of the policy loads the version; returns the checksum of each one that serves it.

        An instance that fails, is too slow, or holds other bytes than `expected` is deregistered, and its requests
        move. Raises EngineError if none is left.
        """
        instances = [instance for instance in self._instances.values() if instance.policy == policy]
        held = await asyncio.gather(*(self._load(instance, version, key, expected) for instance in instances))
        served = {i.name: checksum for i, checksum in zip(instances, held, strict=True) if checksum is not None}
        if not served:
            raise EngineError(f"no instance of '{policy}' serves version {version}: {self._reasons(policy)}")
        return served

    async def usage(self) -> dict[str, EngineUse]:
        """The load of every live instance."""
        live = list(self._instances.values())
        return dict(zip((i.name for i in live), await asyncio.gather(*(i.engine.usage() for i in live)), strict=True))

    async def _load(
        self, instance: _Instance, version: Version, key: ObjectKey, expected: Checksum | None
    ) -> Checksum | None:
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                held = await instance.engine.load_weights(instance.policy, version, key)
        except TimeoutError:
            return self._lose(instance, f"loading version {version} took more than {self._settings.load_timeout_s} s")
        except EngineError as error:
            return self._lose(instance, f"loading version {version} failed: {error}")
        if expected is not None and held != expected:
            return self._lose(instance, f"version {version} has checksum {expected}, but it holds {held}")
        instance.version = version
        return held

    def _enqueue(self, calls: Iterable[_Call]) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._dispatch)
        self._pending.extend(calls)

    def _dispatch(self) -> None:
        """Places all requests of this tick; each instance gets its share in one call."""
        calls, self._pending = self._pending, []
        shares: dict[str, list[_Call]] = defaultdict(list)
        for call in calls:
            if not call.answer.done():
                try:
                    call.instance = self._place(call.request)
                    shares[call.instance].append(call)
                except EngineError as error:
                    call.answer.set_exception(error)
        for name, share in shares.items():
            assert self._tasks is not None
            instance = self._instances[name]
            reader = self._tasks.create_task(self._read(instance, share), name=f"read-{name}")
            instance.readers.add(reader)
            reader.add_done_callback(instance.readers.discard)

    def _place(self, request: GenerationRequest) -> str:
        if self._tasks is None:
            raise EngineError("the pool is not open; requests need `async with pool:` around them")
        router = self._routers.get(request.policy)
        if router is None:
            raise EngineError(f"no policy '{request.policy}' is served; there are: {sorted(self._routers)}")
        if not router.instances:
            raise EngineError(f"no instance of '{request.policy}' is left: {self._reasons(request.policy)}")
        return router.place(request.sampling.max_tokens, request.conversation).instance

    async def _read(self, instance: _Instance, share: Sequence[_Call]) -> None:
        """Runs one batch of an instance to its end; what the instance leaves undone goes to another one."""
        undone = {call.request.request_id: call for call in share}
        try:
            async for generation in instance.engine.generate([call.request for call in share]):
                call = undone.pop(generation.request_id)
                self._routers[instance.policy].finish(instance.name, call.request.sampling.max_tokens)
                if not call.answer.done():
                    call.answer.set_result(generation)
            if undone:
                self._lose(instance, f"it left {len(undone)} requests without an answer")
        except Exception as error:
            # Whatever an engine raises, it is the engine that is lost, not the run.
            self._lose(instance, f"{type(error).__name__}: {error}")
        finally:
            if undone:
                self._enqueue(undone.values())

    async def _abort(self, call: _Call) -> None:
        instance = self._instances.get(call.instance)
        if instance is not None:
            try:
                await instance.engine.abort([call.request.request_id])
            except EngineError as error:
                self._lose(instance, f"aborting failed: {error}")

    def _nothing(self, call: _Call) -> Generation:
        """The answer for an engine that does not even answer to an abort."""
        instance = self._instances.get(call.instance)
        nothing = np.zeros(0, np.float32)
        return Generation(
            request_id=call.request.request_id,
            response_ids=np.zeros(0, np.int32),
            logprobs=nothing,
            raw_logprobs=nothing,
            versions=(VersionRun(0, instance.version if instance else FIRST_VERSION),),
            finish=FinishReason.ABORT,
        )

    def _lose(self, instance: _Instance, reason: str) -> None:
        """Deregisters an instance; its readers end, and what they had undone goes elsewhere."""
        if self._instances.pop(instance.name, None) is None:
            return
        self.lost[instance.name] = reason
        self.on_lost(instance.name, reason)
        self._routers[instance.policy].remove(instance.name)
        for reader in instance.readers:
            if reader is not asyncio.current_task():
                reader.cancel()

    def _reasons(self, policy: PolicyName) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.lost.items() if name.rsplit("/", 1)[0] == policy)
