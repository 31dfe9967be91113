"""Runs requests on the instances of each policy.

    act, act, act --> one tick's requests --> router --> instance 0 | instance 1 | ...
                              ^                               |
                              `---- unfinished ones of a lost instance

consumes:     single requests, from any number of tasks
waits for:    the instances; while a policy has none, for the replacement of a lost one
produces:     one Generation per request, whatever happens to instances
unblocked by: an answer, a timeout, or the loss of an instance
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.errors import EngineError
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.instances import Instance, Instances, Respawn, Weights
from flexmarl.inference.interface import WeightedEngine
from flexmarl.inference.observed import CallRecord, PoolObservers
from flexmarl.inference.settings import PoolSettings
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


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way, and who waits for it."""

    request: GenerationRequest
    answer: asyncio.Future[Generation]
    instance: str = ""
    sent_at: float = 0.0
    over: bool = False
    """Nobody waits for more than what there is of it."""


class InferencePool(PoolObservers):
    """All instances of all policies behind one call. An async context manager: leaving it ends its tasks.

    Who made an engine closes it when the run ends, replacements too; a lost one is closed as soon as it is lost.
    """

    def __init__(
        self,
        instances: Mapping[PolicyName, Sequence[WeightedEngine]],
        settings: PoolSettings | None = None,
        *,
        respawn: Respawn | None = None,
    ) -> None:
        """Instances are named `{policy}/{number}`. Without `respawn`, lost ones are not replaced."""
        super().__init__()
        self._settings = settings or PoolSettings()
        self._calls_waiting: list[_Call] = []
        self._calls_to_place: list[_Call] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False
        self._policies = {
            policy: Instances(
                policy,
                engines,
                self._settings,
                respawn=respawn,
                start=self._start,
                on_available=self._wake,
                observers=self,
            )
            for policy, engines in instances.items()
        }

    @property
    def lost(self) -> dict[str, str]:
        """Why each instance that was given up was."""
        return {name: because for policy in self._policies.values() for name, because in policy.lost.items()}

    async def __aenter__(self) -> "InferencePool":
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._group is not None
        self._open = False
        for task in self._tasks:
            task.cancel()
        self._wake()
        await self._group.__aexit__(None, None, None)

    async def generate(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """The answer to one request; after `timeout_s` it is aborted and comes back as it is, with finish `abort`.

        While no instance is live but a replacement is on its way, waits for it. Cancelling the caller aborts the
        request. Raises EngineError when no instance of the policy is left.
        """
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._enqueue([call])
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(call.answer)
            call.over = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.abort_grace_s):
                    await self._abort(call)
                    return await asyncio.shield(call.answer)
            call.answer.cancel()
            return self._nothing(call)
        except asyncio.CancelledError:
            call.answer.cancel()
            if self._open:
                self._start(self._abort(call), f"abort-{request.request_id}")
            raise

    async def load_weights(
        self, policy: PolicyName, version: Version, key: ObjectKey, expected: Checksum | None = None
    ) -> dict[str, Checksum]:
        """Every instance of the policy loads the version; returns the checksum of each one that serves it.

        From now on a replacement serves no other version. One publication at a time. Raises EngineError if no
        instance is left.
        """
        return await self._instances_of(policy).load(Weights(version, key, expected))

    def lose(self, instance: str, because: str) -> None:
        """Gives up an instance whose death was noticed elsewhere; one that is not live is no error."""
        policy = self._policies.get(PolicyName(instance.rpartition("/")[0]))
        if self._open and policy is not None:
            policy.lose(instance, because)

    async def usage(self) -> dict[str, EngineUse]:
        """The load of every live instance."""
        live = [instance for policy in self._policies.values() for instance in policy.live.values()]
        return dict(zip((i.name for i in live), await asyncio.gather(*(i.engine.usage() for i in live)), strict=True))

    def _enqueue(self, calls: Iterable[_Call]) -> None:
        if not self._calls_to_place:
            asyncio.get_running_loop().call_soon(self._dispatch)
        self._calls_to_place.extend(calls)

    def _wake(self) -> None:
        """Places those that wait for an instance, now that there is one or that none will come."""
        calls, self._calls_waiting = self._calls_waiting, []
        if calls:
            self._enqueue(calls)

    def _dispatch(self) -> None:
        """Places all requests of this tick; each instance gets its share in one call."""
        calls, self._calls_to_place = self._calls_to_place, []
        shares: dict[tuple[PolicyName, str], list[_Call]] = defaultdict(list)
        for call in calls:
            try:
                if self._place(call):
                    shares[call.request.policy, call.instance].append(call)
            except EngineError as error:
                call.answer.set_exception(error)
        for (policy, name), share in shares.items():
            instances = self._policies[policy]
            instance = instances.live[name]
            instance.watch(self._start(self._read(instances, instance, share), f"read-{name}"))

    def _place(self, call: _Call) -> bool:
        """Whether the call has an instance now; else it waits for one, or is over."""
        if call.answer.done():
            return False
        if call.over:
            call.answer.set_result(self._nothing(call))
            return False
        instances = self._instances_of(call.request.policy)
        if instances.expected:
            self._calls_waiting.append(call)
            return False
        if not instances.live:
            raise EngineError(f"no instance of '{instances.policy}' is left: {instances.reasons}")
        sampling = call.request.sampling
        call.instance = instances.router.place(sampling.max_tokens, call.request.conversation).instance
        call.sent_at = asyncio.get_running_loop().time()
        return True

    def _instances_of(self, policy: PolicyName) -> Instances:
        if not self._open:
            raise EngineError("the pool is not open; requests need `async with pool:` around them")
        if policy not in self._policies:
            raise EngineError(f"no policy '{policy}' is served; there are: {sorted(self._policies)}")
        return self._policies[policy]

    async def _read(self, instances: Instances, instance: Instance, share: Sequence[_Call]) -> None:
        """Runs one batch of an instance to its end; what the instance leaves undone goes to another one."""
        undone = {call.request.request_id: call for call in share}
        try:
            async for generation in instance.engine.generate([call.request for call in share]):
                await instance.acknowledged(generation)
                call = undone.pop(generation.request_id)
                instances.router.finish(instance.name, call.request.sampling.max_tokens)
                self.on_call(_record(call, generation))
                if not call.answer.done():
                    call.answer.set_result(generation)
            if undone:
                instances.lose(instance.name, f"it left {len(undone)} requests without an answer")
        except Exception as error:
            # Whatever an engine raises, it is the engine that is lost, not the run.
            instances.lose(instance.name, f"{type(error).__name__}: {error}")
        finally:
            if undone:
                self._enqueue(undone.values())

    async def _abort(self, call: _Call) -> None:
        """Has the instance end the call; one that is with no instance ends at once."""
        instance = self._instance_of(call)
        if instance is None:
            if not call.answer.done():
                call.answer.set_result(self._nothing(call))
            return
        try:
            await instance.engine.abort([call.request.request_id])
        except EngineError as error:
            self.lose(instance.name, f"aborting failed: {error}")

    def _instance_of(self, call: _Call) -> Instance | None:
        instances = self._policies.get(call.request.policy)
        return instances.live.get(call.instance) if instances else None

    def _nothing(self, call: _Call) -> Generation:
        """The answer where there is no engine, or none that answers to an abort."""
        instance = self._instance_of(call)
        return unserved(call.request, instance.version if instance else FIRST_VERSION, FinishReason.ABORT)

    def _start(self, task: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the pool."""
        assert self._group is not None
        started = self._group.create_task(task, name=name)
        self._tasks.add(started)
        started.add_done_callback(self._tasks.discard)
        if not self._open:
            started.cancel()
        return started


def _record(call: _Call, generation: Generation) -> CallRecord:
    return CallRecord(
        instance=call.instance,
        policy=call.request.policy,
        request_id=call.request.request_id,
        sent_at=call.sent_at,
        answered_at=asyncio.get_running_loop().time(),
        prompt_tokens=len(call.request.prompt_ids),
        sampled_tokens=len(generation.response_ids),
        reused_tokens=generation.reused_tokens,
        version=generation.versions[0].version,
        finish=generation.finish,
    )
