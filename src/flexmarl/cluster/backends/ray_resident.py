"""Ray actors as residents: one asynchronous actor for each, with the methods of its contract.

So Ray's own tools show which method of which resident was called.
"""

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from flexmarl.cluster.host import Host, answer, packed
from flexmarl.cluster.interface import ClusterNode, ResidentKind, ResidentPlace, ResidentSpec
from flexmarl.cluster.placement import Placed
from flexmarl.cluster.proxy import methods_of, proxy_of
from flexmarl.errors import WorkerError
from flexmarl.records import WorkerId

T = TypeVar("T")
# Ray gives its own processes 30 s to start, and the process of an actor 60 s.
START_S = 90.0
# Ray ends the calls to a process that it has ended within milliseconds.
QUIET_S = 2.0
# Calls to one resident beyond this number wait in Ray.
CALLS_AT_ONCE = 4096
NAMED = frozenset({ResidentKind.NODE, ResidentKind.STORE})
"""Residents that other residents call, by their names."""


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """Room for one resident on a node, or for two that take turns."""

    node: ClusterNode
    gpus: int = 0
    group: PlacementGroup | None = None
    """The placement group that reserves it; None for an agent, which needs no room."""
    bundle: int = 0


class RayResident(Generic[T]):
    """One actor, and the calls to it that are under way."""

    def __init__(
        self,
        spec: ResidentSpec[T],
        slot: ActorSlot,
        *,
        tasks: asyncio.TaskGroup,
        on_end: Callable[["RayResident[Any]", str | None], None],
        process_ended: Callable[[int], Awaitable[None]],
        placed: Placed | None = None,
        host: type[Host] = Host,
    ) -> None:
        """`on_end` is called once when the resident ends, with the reason if it was lost. `process_ended` waits for the
        end of a process of its node. `placed` is the decision that gave it its slot.
        """
        self.slot, self.placed = slot, placed
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._remote: T = proxy_of(spec, self, tasks)
        self._place = ResidentPlace(node=slot.node.name, pid=0)
        self._on_end, self._process_ended = on_end, process_ended
        self._pending: set[asyncio.Future[Any]] = set()
        self._num_asked, self._quiet = 0, asyncio.Event()
        self._end_reason: str | None = None
        self._made = False
        self._actor = start_actor(spec, slot, host)

    @property
    def name(self) -> WorkerId:
        return self._spec.name

    @property
    def place(self) -> ResidentPlace:
        return self._place

    @property
    def remote(self) -> T:
        return self._remote

    async def start(self) -> None:
        """Waits until its process runs. Raises WorkerError if that takes longer than `START_S`."""
        try:
            async with asyncio.timeout(START_S):
                pid = await self._reply(self._actor.process_id.remote())
        except TimeoutError:
            raise WorkerError(f"{self.name}: Ray did not start its process within {START_S:.0f} s") from None
        self._place = ResidentPlace(node=self._place.node, pid=pid)

    async def make(self) -> None:
        """Makes the hosted object; raises the error of its `make`. From then on the death of the process is a loss."""
        answer(await self._reply(self._actor.make_hosted.remote(packed(self._spec.make))), name=str(self))
        self._made = True
        self._when_done(self._actor.hold_on.remote(), self._died)

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the actor: the `Channel` of the resident's proxy."""
        if self._end_reason is not None:
            raise WorkerError(self._end_reason)
        asked = getattr(self._actor, method).remote(packed(*args, **kwargs))
        return answer(await self._reply(asked), name=str(self))

    async def stop(self) -> None:
        self.end("was stopped")
        await self._process_ended(self._place.pid)

    async def quiet(self) -> None:
        """Waits until Ray has ended every call to it, but no longer than `QUIET_S`.

        Ray must not be shut down before: a reference to a result that goes while it shuts down ends this process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                while self._num_asked:
                    self._quiet.clear()
                    await self._quiet.wait()

    def end(self, how: str, *, lost: str | None = None) -> None:
        """Ends the process, unless it has ended. Calls under way and later ones raise WorkerError.

        `how` completes the error's text; `lost` is the reason if this is a loss.
        """
        if self._end_reason is not None:
            return
        self._end_reason = f"{self} {how}"
        for call in self._pending:
            settle(call, error=WorkerError(self._end_reason))
        with suppress(RayError):
            ray.kill(self._actor)
        self._on_end(self, lost)

    def __str__(self) -> str:
        pid = f"pid {self._place.pid}" if self._place.pid else "starting"
        return f"{self.name} ({pid} on {self._place.node})"

    async def _reply(self, ref: ray.ObjectRef) -> Any:
        """Waits for the actor's answer. `await ref` would miss an end that Ray itself has not noticed."""
        call = self._loop.create_future()
        self._pending.add(call)
        self._when_done(ref, lambda done: self._settle(call, done))
        try:
            return await call
        finally:
            self._pending.discard(call)

    def _settle(self, call: asyncio.Future[Any], done: Future[Any]) -> None:
        error = done.exception()
        if self._made and isinstance(error, ActorDiedError):  # A call can learn of the death before `hold_on` does.
            self._died(done)
        if isinstance(error, RayError):
            error = WorkerError(self._end_reason or f"{self} failed: {reason(error)}")
        settle(call, result=None if error else done.result(), error=error)

    def _died(self, done: Future[Any]) -> None:
        because = reason(done.exception())
        self.end(f"died: {because}", lost=because)

    def _when_done(self, ref: ray.ObjectRef, then: Callable[[Future[Any]], None]) -> None:
        """Has `then` called on the event loop when Ray has ended a call, whichever thread Ray tells it on."""

        def heard(future: Future[Any]) -> None:
            self._num_asked -= 1
            if not self._num_asked:
                self._quiet.set()
            then(future)

        def done(future: Future[Any]) -> None:
            vars(future).pop("object_ref", None)  # The last reference: Ray's thread holds the future a little longer.
            with suppress(RuntimeError):  # the event loop has ended, so nobody waits
                self._loop.call_soon_threadsafe(heard, future)

        self._num_asked += 1
        ref.future().add_done_callback(done)


@lru_cache
def actor_class(contract: type, host: type[Host]) -> Any:
    """The class of actors for a contract: a kind of `Host` with the contract's methods."""

    def method(name: str) -> Callable[..., Any]:
        async def call(self: Host, arguments: bytes) -> bytes:
            return await self.call_method(name, arguments)

        call.__name__ = name
        return call

    methods = {name: method(name) for name in methods_of(contract)}
    return ray.remote(type(f"{contract.__name__}Actor", (host,), methods))


def start_actor(spec: ResidentSpec[Any], slot: ActorSlot, host: type[Host]) -> Any:
    """Starts the actor that hosts a resident. It is never restarted, because its state would be gone.

    Of two residents that take turns in one bundle each asks Ray for half of it. Ray gives both the same accelerator.
    """
    assert not spec.takes_turns or spec.devices <= 1, "Ray gives no halves of several accelerators"
    share = 0.5 if spec.takes_turns else 1
    strategy = (
        NodeAffinitySchedulingStrategy(slot.node.id, soft=False)
        if slot.group is None
        else PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
    )
    return (
        actor_class(spec.contract, host)
        .options(
            name=str(spec.name) if spec.kind in NAMED else None,
            num_cpus=0 if slot.group is None else share,
            num_gpus=slot.gpus * share,
            max_concurrency=CALLS_AT_ONCE,
            enable_task_events=False,
            scheduling_strategy=strategy,
            runtime_env=None if spec.python is None else {"py_executable": str(spec.python)},
        )
        .remote(path=_path(spec), threads=spec.threads)
    )


def _path(spec: ResidentSpec[Any]) -> list[str]:
    """Folders of modules for its process: the controller's; for another interpreter only those outside environments."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    if spec.python is None:
        return folders
    installed = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
    return [folder for folder in folders if not folder.startswith(installed)]


def reason(error: BaseException | None) -> str:
    """Why an actor is gone, in few words. Ray lists the same causes for every death that it did not order."""
    text = " ".join(str(error).split())
    if "low on memory" in text or "memory usage threshold" in text:
        return "Ray ended it because this machine ran out of memory; use smaller models, batches or fewer instances"
    if "unexpected" in text and "connection error" in text:
        return "its process was killed (by hand, or because memory ran out) or crashed"
    if "actor is unavailable" in text.lower() or "temporarily unavailable" in text:
        return "its process, or the node that it ran on, cannot be reached any more"
    detail = re.search(r"Worker exit detail: (.*)", text)
    return (detail[1] if detail else text)[:500]


def settle(call: asyncio.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Gives a call its result or its error, unless it has one already or its caller was cancelled."""
    if call.done():
        return
    if error is None:
        call.set_result(result)
    else:
        call.set_exception(error)


async def all_of(work: Iterable[Awaitable[object]]) -> None:
    """Waits until all of `work` has ended, then raises the first error."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
