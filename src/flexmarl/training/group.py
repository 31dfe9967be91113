"""Trainer of a policy that shares places: the policy's state is on the ranks of a leased place, or set aside in blocks.

  session ──► GroupTrainer ──► rank/0/0 of the leased place ──► the trainer that is resumed there
  residency ── resume, suspend ──┘

The controller keeps the names of the blocks. A session calls while it holds devices. Other calls, such as those of
checkpoints, visit: they wait until the policy has devices.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from flexmarl.cluster.allocation import Lease
from flexmarl.cluster.proxy import alters
from flexmarl.errors import ObjectError, ObjectSpaceError, RankLost, TrainingError, WorkerError, described
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import CreditLine, Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.interface import Appraised, Trainer, UpdateReport

T = TypeVar("T")
CHANGING = frozenset({"accumulate", "close_groups", "step", "reset_reference", "load"})
"""Calls that change the state."""
LOSSES_IN_A_ROW = 3
"""Losses in one call after which its cause is taken to be the call."""
GRACE_S = 10.0
"""Seconds for the other ranks once a call of one has failed: how the loss of its peer is known, or that all failed."""


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
    async def resume(self, policy: PolicyName, aside: SetAside | None, world: int = 1, *, keep: bool = False) -> None:
        """Brings the policy's state onto its device: what `suspend` returned, or its first state if that is None.

        The first `world` ranks of its place hold the policy together; each is called. With `keep`, the blocks stay, and
        weights that a lost rank has set are set anew: nobody learned of them.
        Raises TrainingError if it holds a policy, or if a block cannot be read.
        """
        ...

    @alters
    async def keep(self, room: int | None = None) -> SetAside:
        """Sets a copy of the state aside, beside the copy before. `room` and errors are those of `suspend`."""
        ...

    async def drop(self, before: SetAside, aside: SetAside) -> None:
        """Frees the blocks of `before`, a state or copy that the caller has replaced by `aside`."""
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


class Place(Protocol):
    """The standing ranks of one training place."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks that live now. Rank 0 answers for those that hold a policy together."""
        ...

    async def renew(self, because: str) -> None:
        """Ends all ranks, whatever they do, and starts others in their place. Raises TrainingError if that fails."""
        ...


class GroupTrainer:
    """`Trainer` and `ProcessGroup` of a policy that shares places with others, or has several ranks.

    A lost rank is known by `RankLost`. With `keep`, a copy of the state is set aside after each update. After a loss,
    the ranks of the place are started anew, the policy is resumed from the copy, and the calls since then are made
    again, so that nobody else learns of it.
    """

    def __init__(
        self,
        policy: PolicyName,
        places: Sequence[Place],
        memory: HostMemory | None = None,
        *,
        world: int = 1,
        keep: bool = False,
        timeout_s: float | None = None,
        copy: Callable[[SetAside], Awaitable[None]] | None = None,
    ) -> None:
        """`places` are by number; the first `world` ranks of one train the policy.

        `memory` is that of all policies that share them. A call that takes longer than `timeout_s` has lost its ranks.
        `copy` copies a state to where it outlives the ranks' node; an error of it counts as the loss of that node,
        unless it says that there is no room.
        """
        self._policy, self._places, self._world = policy, places, world
        self._keep, self._timeout_s, self._copy = keep, timeout_s, copy
        self._memory = memory or HostMemory()
        self._place: Place | None = None
        self._aside: SetAside | None = None
        """The state, or the last copy of it while it is on a place."""
        self._since: list[tuple[str, tuple[Any, ...]]] = []
        """Calls that changed the state since the copy was made."""
        self._swapping = asyncio.Lock()
        self._calling = asyncio.Lock()
        self._devices: Devices | None = None

    @property
    def policy(self) -> PolicyName:
        """The policy that it trains."""
        return self._policy

    def join(self, devices: "Devices") -> None:
        """Gives it the way to devices for calls outside of its session."""
        self._devices = devices

    async def resume(self, lease: Lease) -> None:
        """Brings the state onto the ranks of the leased place."""
        async with self._swapping:
            if self._place is None:
                await self._brought(self._places[lease.place])
                self._place = self._places[lease.place]
                if not self._keep:
                    self._aside = None
                    self._memory.taken(self._policy, 0)

    async def suspend(self) -> None:
        """Sets the state aside."""
        async with self._swapping:
            if self._place is not None:
                await self._set_aside("suspend")
                self._place = None

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """Accumulates on the leased place. Raises TrainingError without one."""
        return await self._call("accumulate", micro_batch_id, ids)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes groups on the leased place. Raises TrainingError without one."""
        return await self._call("close_groups", lines)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates on the leased place. Raises TrainingError without one."""
        return await self._call("step", divisors)

    async def publish(self, version: Version) -> Checksum:
        """Sets the weights. Those of a state that is set aside are set already: they are one of its blocks."""
        async with self._swapping:
            aside = self._aside if self._place is None else None
        if aside is not None and aside.version == version and aside.published is not None:
            return aside.published
        async with self._visit():
            checksum = await self._call("publish", version)
            if self._keep and (self._since or self._aside is None):  # The first weights too must outlive a rank.
                async with self._swapping:
                    await self._set_aside("keep")
                if self._aside is not None and self._aside.published is not None:
                    return self._aside.published  # An update that was made again after a loss may have other last bits.
            return checksum

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Computes them where the state is, once it has devices."""
        async with self._visit():
            return await self._call("logprobs", batch)

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Appraises where the state is, once it has devices."""
        async with self._visit():
            return await self._call("appraise", ids)

    async def reset_reference(self) -> None:
        """Resets it where the state is, once it has devices."""
        async with self._visit():
            await self._call("reset_reference")

    async def save(self, path: Path) -> None:
        """Writes from where the state is, once it has devices."""
        async with self._visit():
            await self._call("save", path)

    async def load(self, path: Path) -> Version:
        """Reads to where the state is, once it has devices."""
        async with self._visit():
            version = await self._call("load", path)
            if self._keep:
                async with self._swapping:
                    await self._set_aside("keep")
            return version

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes from where the state is, once it has devices."""
        async with self._visit():
            await self._call("export", path, form)

    def _visit(self) -> AbstractAsyncContextManager[None]:
        return self._devices.visit(self._policy) if self._devices else nullcontext()

    async def _call(self, method: str, *args: Any) -> Any:
        """Makes a call of the ranks that hold the policy; after a loss, of those in their place."""
        if not self._keep:
            return await self._on_all(self._held(), method, *args)
        async with self._calling:
            found = await self._surviving(lambda: self._on_all(self._held(), method, *args))
            if method in CHANGING:
                self._since.append((method, args))
            return found

    async def _set_aside(self, method: Literal["suspend", "keep"]) -> None:
        """Sets the state, or a copy of it, aside: it is then the last copy."""
        place, before, room = self._held(), self._aside, self._memory.room
        held = self._aside.num_bytes if self._aside and not self._aside.on_disk else 0
        room = None if room is None else room + held
        self._memory.taken(self._policy, room or 0)  # Of two that are set aside at once, one gets the room.
        try:
            async with self._calling:
                if self._keep:
                    self._aside = await self._surviving(lambda: self._copied(place, method, room))
                else:
                    self._aside = await self._copied(place, method, room)
                self._since.clear()
                if self._keep and before is not None:
                    new = self._aside
                    assert new is not None, "it has just been made"
                    await self._surviving(lambda: place.ranks[0].drop(before, new), place, held=method == "keep")
        finally:
            aside = self._aside
            self._memory.taken(self._policy, aside.num_bytes if aside and not aside.on_disk else 0)

    async def _copied(self, place: Place, method: str, room: int | None) -> SetAside:
        """Has the ranks set the state aside, and its blocks copied."""
        aside: SetAside = await self._on_all(place, method, room)
        if self._copy is not None:
            try:
                await self._copy(aside)
            except ObjectSpaceError as error:
                raise TrainingError(
                    f"policy '{self._policy}': its state cannot be copied, as process_groups.copies=2 asks: {error}"
                ) from error
            except (KeyError, ObjectError, WorkerError) as error:
                raise RankLost(f"policy '{self._policy}': its state cannot be copied: {described(error)}") from error
        return aside

    async def _brought(self, place: Place) -> None:
        """Brings the policy onto a place, after a loss onto its new ranks."""
        bring = partial(self._bring, place)
        await (self._surviving(bring, place, held=False) if self._keep else bring())

    async def _bring(self, place: Place) -> None:
        """Brings the last copy onto a place, and makes the calls since then again."""
        await self._on_all(place, "resume", self._policy, self._aside, self._world, keep=self._keep)
        for method, args in self._since:
            await self._on_all(place, method, *args)

    async def _surviving(self, call: Callable[[], Awaitable[T]], place: Place | None = None, *, held: bool = True) -> T:
        """Makes a call. After a loss it is made again on new ranks, which hold the policy if the lost ones did."""
        place, because = place or self._held(), ""
        for _ in range(LOSSES_IN_A_ROW):
            try:
                return await call()
            except RankLost as lost:
                because = str(lost)
            await place.renew(because)
            if held:
                with suppress(RankLost):  # The call fails too, and counts it.
                    await self._bring(place)
        raise TrainingError(
            f"policy '{self._policy}': its ranks were lost {LOSSES_IN_A_ROW} times in a row, at last: {because}"
        )

    async def _on_all(self, place: Place, method: str, *args: Any, **options: Any) -> Any:
        """Makes a call of all ranks at the same time; the first one's answer counts. Raises RankLost if one is lost."""
        ranks = place.ranks[: self._world]
        if len(ranks) == 1 and self._timeout_s is None:
            return await getattr(ranks[0], method)(*args, **options)
        calls = [asyncio.ensure_future(getattr(rank, method)(*args, **options)) for rank in ranks]
        try:
            done, left = await asyncio.wait(calls, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if left and any(call.exception() for call in done):  # Peers of a lost rank fail before it is known.
                more, left = await asyncio.wait(left, timeout=GRACE_S)
                done |= more
            errors = [error for call in calls if call in done and (error := call.exception())]
            lost = next((error for error in errors if isinstance(error, RankLost)), None)
            if lost or errors:
                raise lost or errors[0]
            if left:
                raise RankLost(
                    f"policy '{self._policy}': {len(left)} of {len(ranks)} ranks did not answer '{method}' within "
                    f"process_groups.call_timeout_s, {self._timeout_s:g} s; go on from the last checkpoint with "
                    f"--resume"
                )
            return calls[0].result()
        finally:
            for call in calls:
                call.cancel()

    def _held(self) -> Place:
        if self._place is None:
            raise TrainingError(f"policy '{self._policy}' holds no place; resume its process group first")
        return self._place


class Devices(Protocol):
    """The way to devices for calls outside of a policy's session."""

    def visit(self, policy: PolicyName) -> AbstractAsyncContextManager[None]:
        """Waits until the policy has devices, which it keeps inside the block."""
        ...
