"""Runs the swaps of training state: at most `at_once` policies hold devices, and the others' state is set aside.

  sessions   expect ──► hold ............ train, train ──► expect (open step) or leave (published)
  residency        └─ resume ──► wakes ─┘                      └─ suspend, for another one's resume

consumes       calls of sessions: `hold`, `expect`, `close`, `leave`; and the durations of their micro-batches
waits for      process groups that resume and suspend
produces       a policy on its devices, whose session is woken; a `Swapped` for each swap
unblocked by   a session that needs nothing more, or leaves; a swap that has ended

A `ProcessGroup` is the interface to the training processes of a policy, which are all on devices or all off them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, Self

from flexmarl.cluster.allocation import Lease, Places
from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import FlexmarlError, TrainingError, boundary
from flexmarl.events.event import Events
from flexmarl.events.training_events import Swapped
from flexmarl.records import PolicyName, WorkerId
from flexmarl.training.group import Devices
from flexmarl.training.settings import ProcessGroupSettings
from flexmarl.training.swapping import Direction, Need, Standing, Swap, Where, gives_way, next_swap


class ProcessGroup(Protocol):
    """The training processes of one policy. `Residency` calls them, one call at a time.

    Between `suspend` and `resume` the policy holds no device memory. Its training state, gradient sums included, does
    not change (law 9).
    """

    @property
    def policy(self) -> PolicyName:
        """The policy that they train."""
        ...

    def join(self, devices: Devices) -> None:
        """Called once, before the first call. With `devices`, the group can wait for its devices by itself."""
        ...

    async def resume(self, lease: Lease) -> None:
        """Brings weights, optimiser state and gradient sums onto the devices of the leased place.

        The devices belong to the group until `suspend` returns. Raises TrainingError.
        """
        ...

    async def suspend(self) -> None:
        """Sets that state aside in host memory and frees the leased devices. Raises TrainingError."""
        ...


class Residency:
    """Shares training devices between policies. It swaps inside `async with residency.open():`.

    A policy without a process group is always on devices.

    If a swap fails, all sessions are woken, and later calls raise its error.

    >>> Residency({}, ProcessGroupSettings()).hold(PolicyName("solver"), ready=4)
    True
    """

    def __init__(
        self, groups: Mapping[PolicyName, ProcessGroup], settings: ProcessGroupSettings, *, events: Events | None = None
    ) -> None:
        """At first all policies are off devices. Every swap that has ended is emitted to `events`."""
        self._groups, self._settings = groups, settings
        self._events = events or Events()
        self._places = Places(min(settings.at_once or len(groups), len(groups)))
        self._standings = {policy: Standing(policy=policy) for policy in groups}
        self._wakes: dict[PolicyName, Callable[[], None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._swaps: list[asyncio.Task[None]] = []
        self._swapped = asyncio.Event()
        self._failure: FlexmarlError | None = None
        self._visitors: Counter[PolicyName] = Counter()
        """Calls outside of its session that need a policy's devices: they wait for them, or hold them."""
        self._in_session: set[PolicyName] = set()
        """Policies whose sessions hold devices, or wait for them."""
        self._changed = asyncio.Event()
        """Set whenever a policy gets its devices, and when a swap fails."""
        for group in groups.values():
            group.join(self)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Swaps inside the block. Leaving the block cancels the swaps under way."""
        async with task_block() as self._tasks:
            try:
                yield self
            finally:
                for swap in self._swaps:
                    swap.cancel()

    def join(self, policy: PolicyName, wake: Callable[[], None]) -> None:
        """Registers `wake`, which is called when the policy gets devices."""
        self._wakes[policy] = wake

    def hold(self, policy: PolicyName, ready: int, *, keep: bool = False, busy: bool = False) -> bool:
        """Requests the policy's devices for `ready` rows. Returns True if it holds them now, until `expect` or `leave`.

        False means that it must wait; its session is then woken when it holds them. A holder also gets False when
        another policy's turn has come, unless it passes `keep`. With `busy` it still has its devices until it asks
        again.
        """
        self._check()
        standing = self._standings.get(policy)
        if standing is None:
            return True
        standing.ready, standing.done = ready, False
        self._in_session.add(policy)
        if standing.need is Need.HOLDING:
            return keep or bool(self._visitors[policy]) or not self._gives_way(standing, busy=busy)
        if standing.need is Need.NOTHING:
            standing.need, standing.since = Need.WAITING, self._now()
            self._settle()
        return self._standings[policy].need is Need.HOLDING

    def expect(self, policy: PolicyName, ready: int, micro_batch: int) -> None:
        """States that the policy needs no devices before `micro_batch` rows are ready; `ready` of them are."""
        self._check()
        standing = self._standings.get(policy)
        if standing is None:
            return
        news = standing.need is not Need.NOTHING or bool(standing.ready) != bool(ready)
        standing.ready, standing.micro_batch = ready, micro_batch
        standing.done = standing.done and not ready
        self._in_session.discard(policy)
        if news:
            self._rest(standing)

    def close(self, policy: PolicyName) -> None:
        """States that the policy's step takes no more rows. With ready ones it keeps its devices until it leaves.

        Of policies that ask at the same time, those on devices so train there first.
        """
        if standing := self._standings.get(policy):
            standing.due = standing.ready > 0 and standing.need is Need.NOTHING

    def trained(self, policy: PolicyName, num_samples: int, duration_s: float) -> None:
        """Records the duration of a micro-batch of the policy."""
        if num_samples and (standing := self._standings.get(policy)):
            standing.sample_s = duration_s / num_samples

    def updated(self, policy: PolicyName) -> None:
        """Called after the policy's update, before it is published. If `leave` is 'updated', it leaves the devices."""
        if self._settings.leave == "updated":
            self.leave(policy)

    def leave(self, policy: PolicyName) -> None:
        """Ends the policy's step: it needs no devices."""
        self._check()
        if standing := self._standings.get(policy):
            standing.ready, standing.due, standing.done = 0, False, True
            self._in_session.discard(policy)
            self._rest(standing)

    @asynccontextmanager
    async def visit(self, policy: PolicyName) -> AsyncIterator[None]:
        """Waits until the policy has devices, which it keeps inside the block: for calls outside of its session.

        Raises the error of a swap that failed.
        """
        standing = self._standings.get(policy)
        if standing is None:
            yield
            return
        self._visitors[policy] += 1
        try:
            self._check()
            if standing.need is Need.NOTHING:
                standing.need, standing.since = Need.WAITING, self._now()
                self._settle()
            while standing.need is not Need.HOLDING:
                self._changed.clear()
                await self._changed.wait()
                self._check()
            yield
        finally:
            self._visitors[policy] -= 1
            if policy not in self._in_session and self._failure is None:
                self._rest(standing)

    async def suspend_all(self) -> None:
        """Suspends every policy. Returns when none holds a device. Called between the steps of all sessions.

        Raises TrainingError if a policy still needs its devices, or if a swap fails.
        """
        for standing in self._standings.values():
            if standing.need is not Need.NOTHING:
                raise TrainingError(
                    f"policy '{standing.policy}' is {standing.need} on training devices; its session must leave them "
                    "before all are suspended"
                )
            standing.ready = 0
        while there := [s for s in self._standings.values() if s.where is not Where.AWAY]:
            self._check()
            for standing in there:
                if standing.where is Where.HERE:
                    because = "every policy gives its devices back"
                    self._begin(Swap(policy=standing.policy, direction=Direction.SUSPEND, because=because))
            self._swapped.clear()
            await self._swapped.wait()

    @property
    def _free_places(self) -> int:
        """Places on which a policy may be resumed now."""
        return self._places.free

    def _gives_way(self, holder: Standing, *, busy: bool) -> bool:
        because = gives_way(holder, list(self._standings.values()), self._free_places, self._now())
        if because and not busy:
            holder.need, holder.since = Need.WAITING, self._now()
            self._begin(Swap(policy=holder.policy, direction=Direction.SUSPEND, because=because))
        return bool(because)

    def _rest(self, standing: Standing) -> None:
        if self._visitors[standing.policy]:
            return
        if standing.need is not Need.NOTHING:
            standing.need, standing.since = Need.NOTHING, self._now()
        self._settle()

    def _settle(self) -> None:
        """Lets policies that wait and are on devices hold them, and begins the swaps that the rule decides."""
        standings = list(self._standings.values())
        for standing in standings:
            if standing.where is Where.HERE and standing.need is Need.WAITING:
                standing.need = Need.HOLDING
                self._changed.set()
                self._wake(standing.policy)
        while swap := next_swap(standings, self._free_places, self._settings, self._now()):
            self._begin(swap)

    def _begin(self, swap: Swap) -> None:
        assert self._tasks is not None, "policies that share devices need `async with residency.open():` around them"
        standing = self._standings[swap.policy]
        if swap.direction is Direction.RESUME:
            lease = self._places.lease(swap.policy)
            assert lease is not None, f"no place is free for '{swap.policy}'"
            standing.where = Where.COMING
        else:
            lease = self._places.of(swap.policy)
            standing.where = Where.GOING
        task = self._tasks.create_task(self._swap(swap, standing, lease), name=f"{swap.direction}-{swap.policy}")
        self._swaps.append(task)
        task.add_done_callback(self._swaps.remove)

    async def _swap(self, swap: Swap, standing: Standing, lease: Lease) -> None:
        group, began = self._groups[swap.policy], self._now()
        try:
            with boundary(TrainingError, f"policy '{swap.policy}': {swap.direction}"):
                await (group.resume(lease) if swap.direction is Direction.RESUME else group.suspend())
        except FlexmarlError as error:
            self._fail(error)
            return
        took = self._now() - began
        if swap.direction is Direction.RESUME:
            standing.where, standing.resume_s = Where.HERE, took
        else:
            standing.where, standing.suspend_s = Where.AWAY, took
            self._places.release(swap.policy)
        self._swapped.set()
        self._events.emit(
            Swapped(
                process=WorkerId.trainer(swap.policy),
                began=self._events.moment(began),
                policy=swap.policy,
                direction=swap.direction,
                place=lease.place,
                because=swap.because,
            )
        )
        self._settle()

    def _fail(self, error: FlexmarlError) -> None:
        self._failure = self._failure or error
        self._swapped.set()
        self._changed.set()
        for policy in self._standings:
            self._wake(policy)

    def _wake(self, policy: PolicyName) -> None:
        if policy in self._wakes:
            self._wakes[policy]()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
