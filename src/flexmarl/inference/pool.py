"""Runs requests on the instances of each policy.

    act, act, act --> dispatch of each policy --> its instances
    load, lose    --> instances of each policy
    move          --> from the instances of one policy to those of another
    grow          --> one more instance of a policy; it ends first where the room of a lost one is gone

consumes:     single requests, from any number of tasks
waits for:    answers of instances; a free place, while no instance of the policy has one
produces:     one Generation per request, even if instances are lost or moved
unblocked by: an answer, a timeout, the loss of an instance, a new or moved one, or the pool's waking up
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.inference.calls import Call, Instance, Weights
from flexmarl.inference.changes import InstanceChanges
from flexmarl.inference.dispatch import NOT_OPEN, Dispatch
from flexmarl.inference.instances import EndlessRoom, EngineRoom, Instances, Respawn
from flexmarl.inference.interface import EngineCapabilities, InferenceEngine
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationRequest,
    InstanceId,
    IntArray,
    PolicyName,
    Version,
)

USAGE_S = 5.0
"""Seconds within which an instance must report its load to be counted."""


class InferencePool:
    """All instances of all policies behind one call. It serves inside `async with pool.open():`.

    The pool closes a lost engine at once. All other engines, replacements too, are closed by their maker at the end of
    the run.
    """

    def __init__(
        self,
        instances: Mapping[PolicyName, Sequence[InferenceEngine]],
        settings: PoolSettings | None = None,
        *,
        respawn: Respawn | None = None,
        room: EngineRoom | None = None,
        events: Events | None = None,
    ) -> None:
        """`instances` are the engines by policy. Without `respawn`, lost ones are not replaced. Emits to `events`.

        Without `room`, there is no limit, and all engines are of one kind.
        """
        self.events = events or Events()
        self._room = room or EndlessRoom()
        self._settings = settings or PoolSettings()
        self._numbers = itertools.count()
        self._under_way = 0
        self._asked = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._open = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._policies: dict[PolicyName, Instances] = {}
        self._changes = InstanceChanges(
            self._policies,
            self._room,
            self._settings,
            start=self._start,
            awake=self._awake,
            waiting=lambda: self.waiting,
            events=self.events,
        )
        self._policies |= {
            policy: Instances(
                policy,
                engines,
                self._settings,
                respawn=respawn,
                room=self._room,
                make_room=self._changes.make_room,
                start=self._start,
                awake=self._awake,
                on_available=partial(self._give_out, policy),
                events=self.events,
            )
            for policy, engines in instances.items()
        }
        self._aborting: dict[str, asyncio.Future[None]] = {}
        """By request id: the aborts that engines have not acknowledged yet."""
        self._dispatches = {
            policy: Dispatch(of_policy, start=self._start, awake=self._awake, events=self.events)
            for policy, of_policy in self._policies.items()
        }

    @property
    def lost(self) -> dict[InstanceId, str]:
        """By lost instance, the reason of its loss."""
        return {name: because for policy in self._policies.values() for name, because in policy.lost.items()}

    @property
    def given(self) -> dict[PolicyName, dict[InstanceId, int]]:
        """By policy and live instance, the number of requests that the instance has and has not answered.

        Has only policies that have published weights: instances can move only between these.
        """
        return {
            policy: {name: len(instance.running) for name, instance in instances.live.items()}
            for policy, instances in self._policies.items()
            if instances.published
        }

    @property
    def ages(self) -> dict[PolicyName, list[list[float]]]:
        """By policy and live instance, the seconds since it was given each request in `given`, oldest first."""
        now = asyncio.get_running_loop().time()
        return {
            policy: [[now - since for since in instance.running.values()] for instance in instances.live.values()]
            for policy, instances in self._policies.items()
            if instances.published
        }

    @property
    def waiting(self) -> dict[PolicyName, int]:
        """By policy, the number of requests that wait in the line for an instance."""
        return {policy: len(dispatch.line) for policy, dispatch in self._dispatches.items()}

    def growing(self, policy: PolicyName) -> int:
        """Number of further instances of the policy that are being started."""
        return self._policies[policy].growing

    def kind(self, policy: PolicyName) -> str:
        """The kind of the policy's engines. Between two policies of one kind, a move takes a load of weights alone."""
        return self._room.kind(policy)

    @property
    def capabilities(self) -> dict[PolicyName, tuple[EngineCapabilities, ...]]:
        """By policy, the capabilities that its live engines have reported."""
        return {
            policy: tuple(instance.capabilities for instance in instances.live.values())
            for policy, instances in self._policies.items()
        }

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Serves inside the block; leaving it ends the pool's tasks. First asks every engine for its capabilities.

        An engine that does not answer is lost.
        """
        async with task_block() as self._group:
            self._open = True
            try:
                await asyncio.gather(*(instances.ask() for instances in self._policies.values()))
                yield self
            finally:
                self._close()

    async def generate(
        self,
        request: GenerationRequest,
        /,
        *,
        timeout_s: float | None = None,
        interrupted: Callable[[asyncio.Future[Generation]], None] | None = None,
        on_tokens: Callable[[IntArray], None] | None = None,
    ) -> Generation:
        """Returns the answer to one request. After `timeout_s` it is aborted: the tokens so far, with finish `abort`.

        Waits while no instance has a place, or while none is live and one is being started or moved. Cancelling the
        caller aborts the request; `interrupted` then gets the future of the tokens so far, which is done within the
        grace period. Raises EngineError if no instance of the policy is left and nothing was sampled.

        `on_tokens` gets the ids of the answer as they are sampled, but for its last ones, if the engine streams them.
        If the instance is then lost, another one goes on behind them.

        A request with the id of one that was cancelled waits until that one is aborted: engines abort by ids.
        """
        self._instances_of(request.policy)
        while earlier := self._aborting.get(request.request_id):
            await asyncio.wait([earlier])
        loop = asyncio.get_running_loop()
        if on_tokens is not None:
            request = replace(request, streams=True)
        call = Call(request, next(self._numbers), loop.create_future(), asked_at=loop.time(), on_tokens=on_tokens)
        dispatch = self._dispatches[request.policy]
        dispatch.add(call)
        self._under_way += 1
        self._asked.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(call.answer)
            call.over = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.abort_grace_s):
                    await dispatch.abort(call)
                    return _late(await asyncio.shield(call.answer), timeout_s)
            call.answer.cancel()
            nothing = call.whole(dispatch.unserved(call))
            self._lose_if_silent(call)
            return _late(nothing, timeout_s)
        except (asyncio.CancelledError, GeneratorExit):
            call.over = True
            if self._open:
                aborting = self._start(self._abort(dispatch, call), f"abort-{request.request_id}")
                self._aborting[request.request_id] = aborting
                aborting.add_done_callback(lambda _: self._aborting.pop(request.request_id, None))
                loop.call_later(self._settings.abort_grace_s, self._give_up, dispatch, call)
            if not self._open:
                call.answer.cancel()
            elif interrupted is not None:
                interrupted(call.answer)
            else:
                call.answer.add_done_callback(_unread)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._asked.clear()

    async def load_weights(
        self, policy: PolicyName, version: Version, expected: Checksum | None = None
    ) -> dict[InstanceId, Checksum]:
        """Every instance of the policy loads the version. Returns the checksum of each instance that serves it.

        Instances that are started or moved here later serve this version too. The caller makes one publication of a
        policy at a time; the pool may be asleep. Raises EngineError if no instance is left.
        """
        return await self._instances_of(policy).load(Weights(version, expected))

    async def move(
        self, instance: InstanceId, *, to: PolicyName, because: str = "", expected_s: float = 0.0
    ) -> InstanceId:
        """Makes an instance serve the newest weights of the policy `to`; returns its new id.

        Its engine loads them if it is of the same kind as those of `to`. Otherwise it ends, and one of `to` starts.

        `because` and `expected_s`, the seconds that it may take, are of the rule that decided it: they are recorded.

        Its running requests continue at another instance of their policy, or end first (setting `on_move`). If the
        caller is cancelled, the move continues. Raises EngineError in three cases:

        - The move is refused: nothing has changed.
        - The move fails: the instance is lost, and is replaced for the policy `to`.
        - The instance's own policy loses all other instances before its engine is changed: it stays where it is.
        """
        source, target = self._instances_of(instance.policy), self._instances_of(to)
        return await self._changes.move(instance, source, target, because, expected_s)

    def has_room(self, policy: PolicyName) -> bool:
        """True if one more instance of the policy can be started: there is room for it."""
        return self._policies[policy].can_start and self._room.has_room(policy)

    async def grow(self, policy: PolicyName, *, because: str = "", expected_s: float = 0.0) -> InstanceId:
        """Starts one more instance of a policy; returns its id when it serves the newest weights.

        `because` and `expected_s`: see `move`. If the caller is cancelled, the start continues. Raises EngineError if
        there is no room, or the instance does not start: nothing has changed.
        """
        return await self._changes.grow(self._instances_of(policy), because, expected_s)

    async def sleep(self) -> None:
        """Makes every engine that can sleep release its device memory. Running requests pause; new requests wait.

        Waits first for instances that are being started or moved. An engine that fails is lost, and replaced on waking.
        Returns when also the processes of lost ones have been ended: until then they may hold their devices.
        """
        if self._awake.is_set():
            self._awake.clear()
            while arrivals := set[asyncio.Future[None]]().union(*(p.arrivals for p in self._policies.values())):
                await asyncio.wait(arrivals)
            await self._have_all("falling asleep", lambda instance: instance.weighted.sleep())
            while closings := set[asyncio.Future[None]]().union(*(p.closings for p in self._policies.values())):
                await asyncio.wait(closings)

    async def until_asked(self) -> None:
        """Returns when at least one request is under way."""
        await self._asked.wait()

    async def until_awake(self) -> None:
        """Returns when the pool is awake."""
        await self._awake.wait()

    async def wake(self) -> None:
        """Makes every engine take its device memory again, then gives out waiting requests. One that fails is lost."""
        if not self._awake.is_set():
            await self._have_all("waking up", lambda instance: instance.weighted.wake())
            self._awake.set()
            for dispatch in self._dispatches.values():
                dispatch.give_out_soon()

    def lose(self, instance: InstanceId, because: str) -> None:
        """Gives up an instance whose end was noticed elsewhere. Ignored if it is not live.

        `instance` may also be an id that it had before a move.
        """
        instance = self._changes.now(instance)
        policy = self._policies.get(instance.policy)
        if self._open and policy is not None:
            policy.lose(instance, because)

    async def usage(self) -> dict[InstanceId, EngineUse]:
        """The load of every live instance that reports it within `USAGE_S`."""
        live = [instance for policy in self._policies.values() for instance in policy.live.values()]
        loads = await asyncio.gather(*(self._use(instance.engine) for instance in live))
        return {instance.name: use for instance, use in zip(live, loads, strict=True) if use is not None}

    def _instances_of(self, policy: PolicyName) -> Instances:
        if not self._open:
            raise EngineError(NOT_OPEN)
        if policy not in self._policies:
            raise EngineError(f"no policy '{policy}' is served; there are: {sorted(self._policies)}")
        return self._policies[policy]

    def _give_out(self, policy: PolicyName) -> None:
        self._dispatches[policy].give_out_soon()

    async def _abort(self, dispatch: Dispatch, call: Call) -> None:
        """Ends an abandoned call, in the grace period at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.abort_grace_s):
                await dispatch.abort(call)
                await asyncio.wait([call.answer])

    def _give_up(self, dispatch: Dispatch, call: Call) -> None:
        """Ends an abandoned call after its grace period, with the tokens that were sampled so far."""
        self._lose_if_silent(call)
        call.end(dispatch.unserved(call))

    def _lose_if_silent(self, call: Call) -> None:
        """Gives up the instance of a call that was aborted a grace period ago, if it still runs the call.

        Otherwise every later call to the instance might wait as long. A later call may have the same id: an episode
        whose rollout worker was lost is played again.
        """
        instance = call.instance
        sent_at = instance and instance.running.get(call.request.request_id)
        if instance is not None and sent_at == call.sent_at and self._awake.is_set():
            self.lose(instance.name, f"it left an abort unanswered for {self._settings.abort_grace_s:g} s")

    async def _use(self, engine: InferenceEngine) -> EngineUse | None:
        with contextlib.suppress(TimeoutError, EngineError):  # The loss of an engine is noticed by its calls.
            async with asyncio.timeout(USAGE_S):
                return await engine.usage()

    async def _have_all(self, what: str, do: Callable[[Instance], Awaitable[None]]) -> None:
        """Calls `do` on every live engine that can sleep. An engine that fails or is too slow is lost."""
        live = [(policy, instance) for policy in self._policies.values() for instance in policy.live.values()]
        sleepers = [(policy, instance) for policy, instance in live if instance.capabilities.sleeps]
        await asyncio.gather(*(self._have(policy, instance, what, do) for policy, instance in sleepers))

    async def _have(
        self, policy: Instances, instance: Instance, what: str, do: Callable[[Instance], Awaitable[None]]
    ) -> None:
        patience_s = self._settings.load_timeout_s
        deadline = asyncio.timeout(patience_s)
        try:
            async with deadline:
                await do(instance)
        except Exception as error:
            # Any error of an engine costs the engine, not the run.
            late = f"took more than {patience_s} s"
            policy.lose(instance.name, f"{what} " + (late if deadline.expired() else f"failed: {error}"))

    def _start(self, task: Coroutine[Any, Any, None], name: str) -> asyncio.Future[None]:
        """Starts a task that ends with the pool. In a closed pool, returns a cancelled future instead."""
        if not self._open:  # A task group that shuts down accepts no task.
            task.close()
            refused = asyncio.get_running_loop().create_future()
            refused.cancel()
            return refused
        assert self._group is not None
        started = self._group.create_task(task, name=name)
        self._tasks.add(started)
        started.add_done_callback(self._ended)
        return started

    def _ended(self, task: asyncio.Future[None]) -> None:
        """Closes the pool if a task failed, since its task group then ends all other tasks."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._close()

    def _close(self) -> None:
        """Ends the pool's tasks. Callers that wait for an answer get an error."""
        self._open = False
        for task in self._tasks:
            task.cancel()
        for dispatch in self._dispatches.values():
            dispatch.close()


def _unread(answer: asyncio.Future[Generation]) -> None:
    """Reads an answer for a caller that has gone: an error that nobody reads is printed."""
    if not answer.cancelled():
        answer.exception()


def _late(answer: Generation, timeout_s: float | None) -> Generation:
    """Adds the reason to an answer that was aborted because it took too long."""
    if answer.finish is not FinishReason.ABORT or answer.error or timeout_s is None:
        return answer
    return replace(answer, error=f"no whole answer within {timeout_s:g} s; use a larger rollout.call_timeout_s")
