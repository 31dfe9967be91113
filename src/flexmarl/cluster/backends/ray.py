"""Ray for the residents of a run: one asynchronous actor for each, all of them on the controller's machine.

An actor has the methods of its resident's contract, so Ray's own tools show which method of which resident was called.
"""

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import psutil
import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flexmarl.cluster.backends.ray_session import JoinedRay, PrivateRay
from flexmarl.cluster.concurrency import OwnThread, task_block
from flexmarl.cluster.host import Host, answer, packed
from flexmarl.cluster.interface import Resident, ResidentPlace, ResidentSpec, require_new_names, require_one_process
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.proxy import methods_of, proxy_of
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.events.event import Events
from flexmarl.events.run_events import WorkerLost
from flexmarl.records import WorkerId

T = TypeVar("T")
# Ray gives its own processes 30 s to start, and the process of an actor 60 s.
START_S = 90.0
# A placement that is possible takes 0.1 s. A longer one waits for other users' processes to end.
PLACE_S = 5.0
STOP_S = 10.0
WATCH_S = 0.5
# Calls to one resident beyond this number wait in Ray.
CALLS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """Room for one resident, in a placement group."""

    group: PlacementGroup
    bundle: int
    gpus: int


class RayResident(Generic[T]):
    """One actor, and the calls to it that are under way."""

    def __init__(
        self,
        spec: ResidentSpec[T],
        slot: ActorSlot,
        *,
        node: str,
        tasks: asyncio.TaskGroup,
        on_end: Callable[["RayResident[Any]", str | None], None],
    ) -> None:
        """`on_end` is called once when the resident ends, with the reason if it was lost."""
        self.slot = slot
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._remote: T = proxy_of(spec, self, tasks)
        self._place = ResidentPlace(node=node, pid=0)
        self._on_end = on_end
        self._pending: set[asyncio.Future[Any]] = set()
        self._end_reason: str | None = None
        self._made = False
        self._actor = start_actor(spec, slot)

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
        self._actor.hold_on.remote().future().add_done_callback(self._threadsafe(self._died))

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the actor: the `Channel` of the resident's proxy."""
        if self._end_reason is not None:
            raise WorkerError(self._end_reason)
        asked = getattr(self._actor, method).remote(packed(*args, **kwargs))
        return answer(await self._reply(asked), name=str(self))

    async def stop(self) -> None:
        self.end("was stopped")
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            await asyncio.to_thread(psutil.Process(self._place.pid).wait, STOP_S)

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
        ref.future().add_done_callback(self._threadsafe(lambda done: self._settle(call, done)))
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

    def _threadsafe(self, then: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """Wraps `then` so that it runs on the event loop, whichever thread Ray calls it on."""

        def done(future: Future[Any]) -> None:
            with suppress(RuntimeError):  # the event loop has ended, so nobody waits
                self._loop.call_soon_threadsafe(then, future)

        return done


@asynccontextmanager
async def ray_cluster(
    settings: ClusterSettings, *, leases: RunLeases, residents: int, events: Events | None = None
) -> AsyncIterator["RayCluster"]:
    """Opens a cluster for the length of a block, with at most `residents` residents alive at once.

    A private Ray has room for exactly that many. Losses are emitted to `events`. Raises ConfigError if the Ray to join
    cannot be joined, WorkerError if Ray does not answer within `START_S`.
    """
    async with task_block() as tasks:
        cluster = RayCluster(settings, tasks, leases=leases, residents=residents, events=events or Events())
        try:
            await cluster.open()
            yield cluster
        finally:
            await cluster.close()


class RayCluster:
    """The residents of one run, on a private Ray or on one that already runs on this machine."""

    def __init__(
        self, settings: ClusterSettings, tasks: asyncio.TaskGroup, *, leases: RunLeases, residents: int, events: Events
    ) -> None:
        """See `ray_cluster`. Proxies run their tasks in `tasks`."""
        self.events = events
        self._leases = leases
        if settings.address == "local":
            self._ray = PrivateRay(leases, workers=residents, accelerators=settings.device != "cpu")
        else:
            self._ray = JoinedRay(leases, address=settings.address)
        self._thread = OwnThread("ray")
        self._node = ""
        self._tasks = tasks
        self._residents: set[RayResident[Any]] = set()
        self._free: list[ActorSlot] = []
        self._watch: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._closed = False

    @property
    def crosses(self) -> bool:
        return True

    @property
    def has_processes(self) -> bool:
        return True

    async def open(self) -> None:
        """Starts or joins Ray."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        await self._ask(self._ray.open, timeout=START_S)
        self._node = ray.util.get_node_ip_address()
        self._watch = self._tasks.create_task(self._watch_ray(), name="watch ray")

    async def spawn(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        if self._failure is not None:
            raise WorkerError(f"no new residents: {self._failure}")
        for spec in specs:
            require_one_process(spec, nodes=[self._node])
        require_new_names(specs, taken=[resident.name for resident in self._residents])
        slots = await self._slots([spec.devices for spec in specs])
        residents = [
            RayResident(spec, slot, node=self._node, tasks=self._tasks, on_end=self._ended)
            for spec, slot in zip(specs, slots, strict=True)
        ]
        self._residents.update(residents)
        try:
            await all_of(resident.start() for resident in residents)
            self._leases.add_processes(resident.place.pid for resident in residents)
            await all_of(resident.make() for resident in residents)
        except BaseException:
            await all_of(resident.stop() for resident in residents)
            raise
        return list(residents)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for resident in list(self._residents):
            resident.end("was stopped")
        with suppress(WorkerError):
            await self._ask(self._ray.close, timeout=STOP_S)
        self._thread.close()
        await asyncio.to_thread(self._leases.end_processes)

    async def _slots(self, gpus: Sequence[int]) -> list[ActorSlot]:
        """A slot for each number of accelerators in `gpus`: slots of ended residents first, then a new group."""
        found = [self._take(n) for n in gpus]
        missing = [n for n, slot in zip(gpus, found, strict=True) if slot is None]
        try:
            new = (
                await self._ask(lambda: reserve(missing, node=self._node), timeout=PLACE_S + STOP_S) if missing else []
            )
        except BaseException:
            self._free.extend(slot for slot in found if slot is not None)
            raise
        more = iter(new)
        return [slot or next(more) for slot in found]

    def _take(self, gpus: int) -> ActorSlot | None:
        for slot in self._free:
            if slot.gpus == gpus:
                self._free.remove(slot)
                return slot
        return None

    async def _ask(self, work: Callable[[], T], *, timeout: float) -> T:
        try:
            return await self._thread.run(work, timeout=timeout)
        except TimeoutError:
            raise WorkerError(f"Ray did not answer within {timeout:.0f} s") from None

    def _ended(self, resident: RayResident[Any], lost: str | None) -> None:
        self._residents.discard(resident)
        self._free.append(resident.slot)
        if lost is not None:
            place = resident.place
            event = WorkerLost(process=resident.name, node=place.node, pid=place.pid, because=lost)
            asyncio.get_running_loop().call_soon(self.events.emit, event)

    async def _watch_ray(self) -> None:
        """Waits until Ray itself is gone, and then ends all residents as lost."""
        while self._failure is None:
            await asyncio.sleep(WATCH_S)
            self._failure = await asyncio.to_thread(self._ray.failure)
        for resident in list(self._residents):
            resident.end(f"is lost: {self._failure}", lost=self._failure)


@lru_cache
def actor_class(contract: type) -> Any:
    """The class of actors for a contract: a `Host` with the contract's methods."""

    def method(name: str) -> Callable[..., Any]:
        async def call(self: Host, arguments: bytes) -> bytes:
            return await self.call_method(name, arguments)

        call.__name__ = name
        return call

    methods = {name: method(name) for name in methods_of(contract)}
    return ray.remote(type(f"{contract.__name__}Actor", (Host,), methods))


def start_actor(spec: ResidentSpec[Any], slot: ActorSlot) -> Any:
    """Starts the actor that hosts a resident. It is never restarted, because its state would be gone."""
    return (
        actor_class(spec.contract)
        .options(
            num_cpus=1,
            num_gpus=slot.gpus,
            max_concurrency=CALLS_AT_ONCE,
            enable_task_events=False,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle),
        )
        .remote(path=[os.path.abspath(folder) for folder in sys.path], threads=spec.threads)
    )


def reserve(gpus: Sequence[int], *, node: str) -> list[ActorSlot]:
    """Reserves a slot on this machine for each number of accelerators in `gpus`. Raises ConfigError if one has no room.

    All slots are on one machine, because weights travel through its memory and rows are read from its disk.
    """
    asked = {"CPU": float(len(gpus)), "GPU": float(sum(gpus))}
    node_resource = f"node:{node}"
    has = next((one["Resources"] for one in ray.nodes() if one["Alive"] and node_resource in one["Resources"]), {})
    if any(has.get(kind, 0.0) < amount for kind, amount in asked.items()):
        raise ConfigError(f"no room for {len(gpus)} more residents on {node}: {shortage(asked, has)}")
    bundles = [{"CPU": 1.0, "GPU": float(n), node_resource: 0.001} for n in gpus]
    group = placement_group([{k: v for k, v in bundle.items() if v} for bundle in bundles], strategy="STRICT_PACK")
    if not group.wait(PLACE_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"no room for {len(gpus)} more residents on {node} within {PLACE_S:.0f} s: {shortage(asked, has)}; "
            f"free in all of Ray now: {amounts(free)}"
        )
    return [ActorSlot(group, bundle, n) for bundle, n in enumerate(gpus)]


def shortage(asked: Mapping[str, float], has: Mapping[str, float]) -> str:
    """Says, for an error, what a placement needs, what the machine has, and what would help."""
    return (
        f"they need {amounts(asked)} (one CPU each, and with cluster.device=cuda one GPU), it has {amounts(has)}; "
        "use fewer instances, cluster.device=cpu, or cluster.address=local, which has a CPU for every resident"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs in words.

    >>> amounts({"CPU": 2.0, "memory": 1e9})
    '2 CPU and 0 GPU'
    """
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def reason(error: BaseException | None) -> str:
    """Why an actor is gone, in few words. Ray lists the same causes for every death that it did not order."""
    text = " ".join(str(error).split())
    if "low on memory" in text or "memory usage threshold" in text:
        return "Ray ended it because this machine ran out of memory; use smaller models, batches or fewer instances"
    if "unexpected" in text and "connection error" in text:
        return "its process was killed (by hand, or because memory ran out) or crashed"
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
