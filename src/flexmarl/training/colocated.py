"""Runs the turns of trainers and engines on the same devices (mode `colocated`), which are never asked to hold both.

    engines     awake ──► asleep                                     awake ──►
    devices          (freed)    lent ───────────────── taken back (freed)
    trainers                      resume, train, suspend

consumes       entries into `training`: a step's training phase, and calls of trainers outside of it (`visit`)
waits for      engines that give their devices up; process groups that are suspended
produces       devices for trainers inside `training`, for engines outside of it; a `DevicesFreed` for each change
unblocked by   the last engine that sleeps, or the last policy that is off its place
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from flexmarl.events.event import Events
from flexmarl.events.training_events import DevicesFreed
from flexmarl.records import CONTROLLER, PolicyName
from flexmarl.training.residency import ProcessGroup, Residency
from flexmarl.training.settings import ProcessGroupSettings


class Sleepers(Protocol):
    """The engines on the devices of the places."""

    async def sleep(self) -> None:
        """Returns when all of them have given their devices up. One that fails is lost: then it holds nothing."""
        ...

    async def wake(self) -> None:
        """Has them take their devices again. Lost ones are replaced from now on."""
        ...


class ColocatedResidency(Residency):
    """Shares training devices between policies, while engines do not hold them.

    Engines hold them at first. A policy without a process group is always on devices, also while engines are awake.
    """

    def __init__(
        self,
        groups: Mapping[PolicyName, ProcessGroup],
        settings: ProcessGroupSettings,
        *,
        engines: Sleepers,
        events: Events | None = None,
    ) -> None:
        """`engines` have the devices of all places. What it does is emitted to `events`."""
        super().__init__(groups, settings, events=events)
        self._engines = engines
        self._inside = 0
        """Entries into `training` that have not been left."""
        self._lent = False
        """True while trainers may hold devices."""
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Trainers may hold devices inside the block, engines outside of it. Blocks may overlap and nest."""
        await self.begin_training()
        try:
            yield
        except asyncio.CancelledError:
            self._inside -= 1  # The run ends: nobody plays on these engines any more.
            raise
        except BaseException:
            await self.end_training()
            raise
        await self.end_training()

    async def begin_training(self) -> None:
        """Enters: returns when engines sleep, and trainers may hold the devices."""
        async with self._changing:
            if not self._lent:
                began = self._events.now()
                await self._engines.sleep()
                self._freed("engines", began, "trainers need the devices")
                self._lent = True
                self._settle()
            self._inside += 1

    async def end_training(self) -> None:
        """Leaves. The last one to leave has all policies suspended, and then wakes the engines.

        Raises TrainingError if a policy still needs its devices, or if a swap fails: engines then sleep on.
        """
        async with self._changing:
            self._inside -= 1
            if self._inside:
                return
            began, self._lent = self._events.now(), False
            await self.suspend_all()
            self._freed("trainers", began, "no trainer needs the devices")
            await self._engines.wake()

    @asynccontextmanager
    async def visit(self, policy: PolicyName) -> AsyncIterator[None]:
        """Waits until the policy has devices, which it keeps inside the block. Engines sleep meanwhile."""
        async with self.training(), super().visit(policy):
            yield

    @property
    def _free_places(self) -> int:
        return super()._free_places if self._lent else 0

    def _freed(self, by: str, began: float, because: str) -> None:
        self._events.emit(DevicesFreed(process=CONTROLLER, began=began, by=by, because=because))
