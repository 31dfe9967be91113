"""Trainer of a policy that shares places: the policy's state is on the ranks of a leased place, or set aside in blocks.

  session ──► GroupTrainer ──► rank/0/0 of the leased place ──► the trainer that is resumed there
  residency ── resume, suspend ──┘

The controller keeps the names of the blocks. A session calls while it holds devices. Other calls, such as those of
checkpoints, visit: they wait until the policy has devices.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from flexmarl.cluster.allocation import Lease
from flexmarl.cluster.proxy import alters
from flexmarl.errors import TrainingError
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import CreditLine, Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.interface import Appraised, Trainer, UpdateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A policy's training state while it is on no device."""

    number: int
    """How often the policy was set aside before."""
    version: Version
    published: Checksum | None
    """Checksum of the weights of `version`, which are set in the object store; None if they are not."""
    blocks: Mapping[str, ObjectKey]
    """The objects that hold its tensors, by kind (training/backends/state.py)."""
    tensors: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    """Type and shape of each tensor, by kind and name."""
    num_bytes: int = 0
    """Bytes of the blocks but for the weights."""
    on_disk: bool = False
    """True if there was no room for them in host memory."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the state: counts and names."""


class Rank(Trainer, Protocol):
    """One training process of a place. It holds one policy's state at a time, and is the trainer of that policy.

    Calls of `Trainer` raise TrainingError while it holds none.
    """

    @alters
    async def resume(self, policy: PolicyName, aside: SetAside | None) -> None:
        """Brings the policy's state onto its device: what `suspend` returned, or its first state if that is None.

        Raises TrainingError if it holds a policy, or if a block cannot be read.
        """
        ...

    @alters
    async def suspend(self, room: int | None = None) -> SetAside:
        """Sets the state aside and frees the device. Nothing of the policy stays in the process.

        A state of more than `room` bytes goes to disk; None is no bound. Raises TrainingError if it holds no policy, or
        if a block cannot be written; then the state stays.
        """
        ...


class HostMemory:
    """The host memory that states may take while they are set aside. What does not fit goes to disk.

    Policies are trained in turns, so the one that was set aside last comes back last: what came first keeps its room.

    >>> memory = HostMemory(100)
    >>> memory.room, memory.taken(PolicyName("solver"), 80), memory.room
    (100, None, 20)
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        """None is no bound."""
        self._num_bytes = num_bytes
        self._taken: dict[PolicyName, int] = {}

    @property
    def room(self) -> int | None:
        """Bytes that are free; None is no bound."""
        return None if self._num_bytes is None else max(0, self._num_bytes - sum(self._taken.values()))

    def taken(self, policy: PolicyName, num_bytes: int) -> None:
        """Notes the bytes that a policy's state takes from now on."""
        self._taken[policy] = num_bytes


class GroupTrainer:
    """`Trainer` and `ProcessGroup` of a policy that shares places with others."""

    def __init__(self, policy: PolicyName, places: Sequence[Rank], memory: HostMemory | None = None) -> None:
        """`places` has the rank of each place, by its number. `memory` is that of all policies that share them."""
        self._policy, self._places = policy, places
        self._memory = memory or HostMemory()
        self._rank: Rank | None = None
        self._aside: SetAside | None = None
        self._swapping = asyncio.Lock()
        self._devices: Devices | None = None

    @property
    def policy(self) -> PolicyName:
        """The policy that it trains."""
        return self._policy

    def join(self, devices: "Devices") -> None:
        """Gives it the way to devices for calls outside of its session."""
        self._devices = devices

    async def resume(self, lease: Lease) -> None:
        """Brings the state onto the rank of the leased place."""
        async with self._swapping:
            if self._rank is None:
                rank = self._places[lease.place]
                await rank.resume(self._policy, self._aside)
                self._rank, self._aside = rank, None
                self._memory.taken(self._policy, 0)

    async def suspend(self) -> None:
        """Sets the state aside."""
        async with self._swapping:
            if self._rank is not None:
                room = self._memory.room
                self._memory.taken(self._policy, room or 0)  # Of two that are set aside at once, one gets the room.
                try:
                    self._aside = await self._rank.suspend(room)
                finally:
                    aside = self._aside
                    self._memory.taken(self._policy, aside.num_bytes if aside and not aside.on_disk else 0)
                self._rank = None

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Accumulates on the leased place. Raises TrainingError without one."""
        return await self._held().accumulate(micro_batch_id, ids)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes groups on the leased place. Raises TrainingError without one."""
        return await self._held().close_groups(lines)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates on the leased place. Raises TrainingError without one."""
        return await self._held().step(divisors)

    async def publish(self, version: Version) -> Checksum:
        """Sets the weights. Those of a state that is set aside are set already: they are one of its blocks."""
        async with self._swapping:
            aside = self._aside
        if aside is not None and aside.version == version and aside.published is not None:
            return aside.published
        async with self._visit():
            return await self._held().publish(version)

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Computes them where the state is, once it has devices."""
        async with self._visit():
            return await self._held().logprobs(batch)

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Appraises where the state is, once it has devices."""
        async with self._visit():
            return await self._held().appraise(ids)

    async def reset_reference(self) -> None:
        """Resets it where the state is, once it has devices."""
        async with self._visit():
            await self._held().reset_reference()

    async def save(self, path: Path) -> None:
        """Writes from where the state is, once it has devices."""
        async with self._visit():
            await self._held().save(path)

    async def load(self, path: Path) -> Version:
        """Reads to where the state is, once it has devices."""
        async with self._visit():
            return await self._held().load(path)

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes from where the state is, once it has devices."""
        async with self._visit():
            await self._held().export(path, form)

    def _visit(self) -> AbstractAsyncContextManager[None]:
        return self._devices.visit(self._policy) if self._devices else nullcontext()

    def _held(self) -> Rank:
        if self._rank is None:
            raise TrainingError(f"policy '{self._policy}' holds no place; resume its process group first")
        return self._rank


class Devices(Protocol):
    """The way to devices for calls outside of a policy's session."""

    def visit(self, policy: PolicyName) -> AbstractAsyncContextManager[None]:
        """Waits until the policy has devices, which it keeps inside the block."""
        ...
