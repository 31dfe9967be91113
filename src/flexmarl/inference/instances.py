"""Runs the instances of one policy: they load weights, and those that fail are given up and replaced.

    live --- loaded --> live
      |'-- moved --> leaving --> empty --> loads its new policy's weights -------> live there
      |                 |                     |
      '-----------------'---------------------'-- died, failed, late, wrong checksum --> lost --> closed
      replacement: started --> loaded --> live                                                      |
           |  ^-------------------------------------------------------------------------------------'
           '--> failed: lost, the next one is started
      further one: started --> loaded --> live (grown); closed if its room is missed elsewhere, not replaced if lost

consumes:     published weights, losses, and instances that come from other policies
waits for:    engines that load, close or start, each for a bounded time; replacements wait until the pool is awake
produces:     live instances, all of which hold the newest weights once `load` has returned
unblocked by: the engine, or its deadline
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.serving_events import InstanceLost, InstanceReplaced, Loaded
from flexmarl.inference.calls import Instance, Weights
from flexmarl.inference.interface import InferenceEngine
from flexmarl.inference.routing import Router
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum, confirms
from flexmarl.records import InstanceId, PolicyName, WorkerId

Respawn = Callable[[PolicyName, InstanceId], Awaitable[InferenceEngine]]
"""Starts an engine for a policy and a new instance's name, which was never used before. The lost one is closed."""
Start = Callable[[Coroutine[Any, Any, None], str], asyncio.Future[None]]
"""Starts a named task that ends with the pool. If the pool is closed, it returns a cancelled future instead."""


class EngineRoom(Protocol):
    """The room that engines live in. The pool asks it before it starts an engine, and gives room back through it."""

    def kind(self, policy: PolicyName) -> str:
        """The kind of the policy's engines: those of one kind take over each other's policy by loading weights."""
        ...

    def has_room(self, policy: PolicyName, *, without: Sequence[InferenceEngine] = ()) -> bool:
        """True if one more engine of the policy would find room, if the engines of `without` had ended."""
        ...

    async def end(self, engine: InferenceEngine) -> None:
        """Ends a closed engine's process, and frees its room. A second call does nothing."""
        ...


class EndlessRoom:
    """Room for any number of engines, all of one kind."""

    def kind(self, policy: PolicyName) -> str:
        """Returns the only kind."""
        return ""

    def has_room(self, policy: PolicyName, *, without: Sequence[InferenceEngine] = ()) -> bool:
        """Returns True."""
        return True

    async def end(self, engine: InferenceEngine) -> None:
        """Does nothing: the engine is its maker's."""


class Instances:
    """The instances of one policy, named `{policy}/{number}`. No number is used twice."""

    def __init__(
        self,
        policy: PolicyName,
        engines: Sequence[InferenceEngine],
        settings: PoolSettings,
        *,
        respawn: Respawn | None,
        room: EngineRoom,
        make_room: Callable[[PolicyName], Awaitable[bool]],
        start: Start,
        awake: asyncio.Event,
        on_available: Callable[[], None],
        events: Events,
    ) -> None:
        """`on_available` is called when an instance becomes live, or when no more will come.

        `make_room` ends further instances of any policy if a replacement would find no room. It returns True if this
        policy has got an instance of another one instead. No replacement is started while `awake` is not set.
        """
        self.policy = policy
        names = [InstanceId(policy, number) for number in range(len(engines))]
        self.live = {name: Instance(name, engine) for name, engine in zip(names, engines, strict=True)}
        self.leaving: dict[InstanceId, Instance] = {}
        """Instances on their way to another policy. Until they serve it, this policy can take them back."""
        self.router = Router(self.live, settings.routing, max_running=settings.max_running)
        self.lost: dict[InstanceId, str] = {}
        """Why each instance was given up."""
        self._settings, self._respawn, self._start, self._awake = settings, respawn, start, awake
        self._on_available, self._events = on_available, events
        self._room, self._make_room = room, make_room
        self._numbers = itertools.count(len(engines))
        self._replacements_left = settings.replacements if respawn else 0
        self._coming = 0
        self.growing = 0
        """Number of further instances that are being started."""
        self.arrivals: set[asyncio.Future[None]] = set()
        """A future for each instance that is being started or moved here; done when that has ended, well or not."""
        self.closings: set[asyncio.Future[None]] = set()
        """A future for each lost instance that may still have its devices; done when its process has been ended."""
        self._newest: Weights | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def expected(self) -> bool:
        """True if none is live, but one is being started, moves here, or is leaving and can be taken back."""
        return not self.live and (self._coming > 0 or bool(self.leaving))

    @property
    def published(self) -> bool:
        """True if the policy has published weights, which an instance from another policy could load."""
        return self._newest is not None

    @property
    def can_start(self) -> bool:
        """True if instances can be started."""
        return self._respawn is not None

    @property
    def continues(self) -> bool:
        """True if every live instance can continue responses that another instance began."""
        return all(instance.capabilities.continues for instance in self.live.values())

    @property
    def is_empty(self) -> bool:
        """True if no instance is live, and none is being started or moved here."""
        return not self.live and not self._coming

    async def ask(self) -> None:
        """Asks every engine for its capabilities. An engine that fails to answer, or is too slow, is lost."""
        await asyncio.gather(*(self._ask_live(instance) for instance in list(self.live.values())))

    async def load(self, weights: Weights) -> dict[InstanceId, Checksum]:
        """Has every live instance load. Returns the checksum of each instance that serves the weights.

        An instance that fails, is too slow, or has an unexpected checksum is lost. If none is live, it waits for a
        replacement. Raises EngineError if none is left. Calls must not overlap.
        """
        self._newest = weights
        for instance in self.live.values():
            instance.loading = self._start(self._reload(instance, weights), f"load-{instance.name}")
            instance.watch(instance.loading)
        loads = [instance.loading for instance in self.live.values() if instance.loading is not None]
        if loads:
            await asyncio.wait(loads)
        await self._settled.wait()
        held = {i.name: i.checksum for i in self.live.values() if i.holds is weights and i.checksum is not None}
        if not held:
            because = self.reasons or "the pool was left meanwhile"
            raise EngineError(f"no instance of '{self.policy}' serves version {weights.version}: {because}")
        return held

    def lose(self, name: InstanceId, because: str) -> None:
        """Gives up an instance: its tasks are cancelled, and it is replaced if a replacement is left.

        If it was leaving, its new policy replaces it.
        """
        instance = self.live.get(name) or self.leaving.get(name)
        if instance is None or instance.lost:
            return
        instance.lost = True
        self.router.remove(name)
        self._record_loss(name, because)
        for task in instance.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self.live.pop(name, None):
            self.replace(instance)

    def replace(self, lost: Instance) -> None:
        """Closes a lost instance, and starts another one in its place if a replacement is left.

        A grown one is not replaced while the policy has others: who decided on it decides again.
        """
        last = self.is_empty and not self.leaving
        closing = self._start(self._close(lost.engine), f"close-{lost.name}")
        self.closings.add(closing)
        closing.add_done_callback(self.closings.discard)
        if self._replacements_left and (last or not lost.grown):
            self._start(self._replace(lost, closing), f"replace-{lost.name}")
            self._coming += 1
        self._settle()

    def leave(self, name: InstanceId) -> Instance:
        """Takes a live instance out of service: it gets no more requests and loads.

        Raises EngineError if there is no such instance, or if it is the last one.
        """
        if name not in self.live:
            raise EngineError(f"'{name}' cannot be moved: it is not live; live are: {sorted(self.live)}")
        if len(self.live) == 1:
            raise EngineError(f"'{name}' cannot be moved: it is the last live instance of '{self.policy}'")
        self.router.remove(name)
        self.leaving[name] = instance = self.live.pop(name)
        return instance

    def left(self, instance: Instance) -> None:
        """Notes that a leaving instance has ended its move."""
        del self.leaving[instance.name]
        self._settle()

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Announces an instance while the block lasts: calls and loads wait for it if none is live."""
        self._coming += 1
        try:
            with self._arriving():
                yield
        finally:
            self._coming -= 1
            self._settle()

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[None]:
        arrival = asyncio.get_running_loop().create_future()
        self.arrivals.add(arrival)
        try:
            yield
        finally:
            self.arrivals.discard(arrival)
            arrival.set_result(None)

    async def take_in(
        self, moved: Instance, *, unless: Callable[[], bool] = lambda: False
    ) -> tuple[InstanceId | None, str]:
        """Makes a moved engine an instance of this policy, live once it holds the newest weights.

        Returns its new id and "". If loading fails, the instance is lost and replaced, and the text says why. If
        `unless()` is true after the load, the instance does not become live, and the id is None.
        """
        instance = Instance(self._new_id(), moved.engine, moved.capabilities, grown=moved.grown)
        if failure := await self._join(instance, unless):
            self._record_loss(instance.name, failure)
            self.replace(instance)
        return (instance.name if failure or instance.name in self.live else None), failure

    async def take_over(self, moved: Instance) -> tuple[InstanceId, str]:
        """Closes another policy's engine, and starts an instance of this policy in its place.

        Returns the new id and "". If it does not start, it is lost and replaced, and the text says why.
        """
        name = self._new_id()
        await self.close(moved)
        if failure := await self._spawn(name, grown=moved.grown):
            self._record_loss(name, failure)
            self.replace(Instance(name, moved.engine, grown=moved.grown))
        return name, failure

    async def grow(self) -> tuple[InstanceId, str]:
        """Starts one more instance. Returns its id and "", or the reason why it did not start: nothing has changed."""
        name = self._new_id()
        self.growing += 1
        try:
            with self.expecting():
                return name, await self._spawn(name, grown=True)
        finally:
            self.growing -= 1

    async def close(self, instance: Instance) -> None:
        """Closes the engine of an instance that has left, and gives its room back."""
        await self._close(instance.engine)

    @property
    def reasons(self) -> str:
        """Why each lost instance was given up, as one text."""
        return "; ".join(f"{name}: {because}" for name, because in self.lost.items())

    async def _ask_live(self, instance: Instance) -> None:
        patience_s = self._settings.start_timeout_s
        deadline = asyncio.timeout(patience_s)
        try:
            async with deadline:
                instance.capabilities = await instance.engine.capabilities()
        except (EngineError, TimeoutError) as error:
            self.lose(instance.name, f"asking what it can do {_how(error, deadline, patience_s)}")

    async def _reload(self, instance: Instance, weights: Weights) -> None:
        if failure := await self._load(instance, weights):
            self.lose(instance.name, failure)

    async def _load(self, instance: Instance, weights: Weights) -> str:
        """Has the instance load. Returns "", or why it does not hold the weights."""
        if not instance.capabilities.loads_weights:
            return f"version {weights.version} was published, but its engine does not load weights"
        what = f"version {weights.version}"
        began, deadline = self._events.now(), asyncio.timeout(self._settings.load_timeout_s)
        try:
            async with deadline:
                held = await instance.weighted.load_weights(self.policy, weights.version)
        except Exception as error:
            # Any error of an engine costs the engine, not the run.
            return f"loading {what} {_how(error, deadline, self._settings.load_timeout_s)}"
        if weights.expected is not None and not confirms(held, weights.expected):
            return f"{what} has checksum {weights.expected}, but it holds {held}"
        instance.version, instance.holds, instance.checksum = weights.version, weights, held
        self._events.emit(
            Loaded(
                process=WorkerId.engine(instance.name),
                began=began,
                policy=self.policy,
                version=weights.version,
                checksum=held,
            )
        )
        return ""

    async def _replace(self, old: Instance, closing: asyncio.Future[None]) -> None:
        """Waits for the old engine's end, then starts instances until one serves in its place, or none is left."""
        lost_at = self._events.now()
        try:
            await asyncio.wait([closing])
            while self._replacements_left:
                while not self._awake.is_set():  # It may be asleep again when the wait for it has ended.
                    await self._awake.wait()
                self._replacements_left -= 1
                name = self._new_id()
                with self._arriving():
                    if await self._make_room(self.policy):
                        return
                    failure = await self._spawn(name)
                if not failure:
                    self._events.emit(
                        InstanceReplaced(
                            process=WorkerId.engine(name),
                            began=lost_at,
                            instance=name,
                            replaces=old.name,
                            version=self.live[name].version,
                            because=f"{old.name} was lost",
                        )
                    )
                    return
                self._record_loss(name, failure)
        finally:
            self._coming -= 1
            self._settle()

    async def _spawn(self, name: InstanceId, *, grown: bool = False) -> str:
        """Starts an instance, which becomes live once it holds the newest weights. Returns "", or why it failed."""
        assert self._respawn is not None
        deadline = asyncio.timeout(self._settings.start_timeout_s)
        engine: InferenceEngine | None = None
        try:
            async with deadline:
                engine = await self._respawn(self.policy, name)
                instance = Instance(name, engine, await engine.capabilities(), grown=grown)
        except Exception as error:
            if engine is not None:
                await self._close(engine)
            return f"starting it {_how(error, deadline, self._settings.start_timeout_s)}"
        if failure := await self._join(instance):
            await self._close(engine)
        return failure

    async def _join(self, instance: Instance, unless: Callable[[], bool] = lambda: False) -> str:
        """Loads the newest weights into an instance and makes it live, unless `unless()` is true then.

        Returns "", or why loading failed: the caller closes the engine.
        """
        while (weights := self._newest) is not None and instance.holds is not weights:
            failure = await self._load(instance, weights)
            # If newer weights came during the load, the store may have released these: the instance is not to blame.
            if failure and weights is self._newest:
                return failure
        if not unless():
            self.live[instance.name] = instance
            self.router.add(instance.name)
        return ""

    async def _close(self, engine: InferenceEngine) -> None:
        """Closes an engine and ends it, for a bounded time. Errors are ignored: why it has to go is known already."""
        for ends in (engine.close, partial(self._room.end, engine)):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._settings.close_timeout_s):
                    await ends()

    def _new_id(self) -> InstanceId:
        return InstanceId(self.policy, next(self._numbers))

    def _record_loss(self, name: InstanceId, because: str) -> None:
        self.lost[name] = because
        self._events.emit(InstanceLost(instance=name, because=because))

    def _settle(self) -> None:
        """Wakes the tasks that wait for an instance, unless none is live and one may still come."""
        if self.expected:
            self._settled.clear()
        else:
            self._settled.set()
            self._on_available()


def _how(error: Exception, deadline: asyncio.Timeout, patience_s: float) -> str:
    return f"took more than {patience_s} s" if deadline.expired() else f"failed: {type(error).__name__}: {error}"
