"""Room for engines of a run on its cluster: starts them, ends them, and says whether one more fits.

engines that compute     fit where the nodes of the pool `rollout` have free CPUs and accelerators
modelled, timed engines  take no room on a node: `simulation.room` of them fit beside the configured ones
shared engines           serve several policies: the first that asks starts one, the others get views of it
"""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexmarl.cluster.interface import Cluster, Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.placement import RoomRequest, needed, spare_cores
from flexmarl.config import RunSettings
from flexmarl.events.run_events import ProcessEnded, ProcessStarted
from flexmarl.inference.interface import InferenceEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import kind_of
from flexmarl.inference.shared_engine import EngineView, SharedEngines
from flexmarl.records import InstanceId, PolicyName, WorkerId

if TYPE_CHECKING:
    from flexmarl.assemble.world import Processes, Residents

NOT_STARTED = -1
"""Number of an instance that is only asked about."""


class RunEngines:
    """The live engines of a run and the room that they take: the `EngineRoom` of its pool."""

    def __init__(self, settings: RunSettings, cluster: Cluster, residents: "Residents", processes: "Processes") -> None:
        """`processes` gets each process that is started, and loses each that is ended."""
        self._settings, self._cluster, self._residents, self._processes = settings, cluster, residents, processes
        self._live: dict[int, Resident[InferenceEngine]] = {}
        """By the `id` of the engine, which lives as long as its resident is here."""
        shared = {of: SharedEngines(self._spawn) for p in settings.policies if len(of := settings.together(p)) > 1}
        self._shared = {PolicyName(policy): engines for of, engines in shared.items() for policy in of}
        """By each of the policies that they serve."""
        self._starting: dict[WorkerId, ResidentSpec[InferenceEngine]] = {}
        self._modelled = frozenset(name for name in settings.policies if settings.is_modelled(name))
        configured = sum(settings.policies[name].instances for name in self._modelled)
        self._most_modelled = configured + settings.simulation.room
        self._kinds = {policy: self._kind(policy) for policy in map(PolicyName, settings.policies)}

    def add(self, resident: Resident[Any]) -> None:
        """Adds an engine that has started."""
        self._live[id(resident.remote)] = resident
        if shared := self._shared.get(resident.name.instance.policy):
            shared.add(resident.remote)

    async def start(self, policy: PolicyName, instance: InstanceId) -> InferenceEngine:
        """Starts an engine; simulated ones take their modelled time first. Raises ConfigError if it has no room.

        Where policies are served together, it is a view of one that has started, or that another policy starts.
        """
        return await self.view(instance) or await self._spawn(policy, instance)

    async def view(self, instance: InstanceId) -> InferenceEngine | None:
        """Returns an instance's view of a shared engine; None if it has an engine of its own."""
        shared = self._shared.get(instance.policy)
        return await shared.view(instance.policy, instance) if shared else None

    async def _spawn(self, policy: PolicyName, instance: InstanceId) -> InferenceEngine:
        spec = self._residents.engine(policy, instance)
        self._starting[spec.name] = spec
        try:
            if seconds := self._residents.replacement_s(policy):
                await asyncio.sleep(seconds)
            (resident,) = await self._cluster.spawn([spec])
            self._live[id(resident.remote)] = resident
        finally:
            del self._starting[spec.name]
        if self._cluster.has_processes and not spec.in_controller:
            self._processes.add(resident)
            place = resident.place
            self._cluster.events.emit(ProcessStarted(process=spec.name, pid=place.pid, node=place.node))
        return resident.remote

    async def end(self, engine: InferenceEngine) -> None:
        """Ends the resident that hosts an engine, or a view of it. An engine that has ended is ignored."""
        if isinstance(engine, EngineView):
            async with engine.shared.ending:
                await self._end(engine.engine)
        else:
            await self._end(engine)

    async def _end(self, engine: InferenceEngine) -> None:
        if (resident := self._live.pop(id(engine), None)) is None:
            return
        place = self._processes.places.pop(resident.name, None)
        await resident.stop()
        if place is not None:
            self._cluster.events.emit(ProcessEnded(process=resident.name, pid=place.pid, node=place.node))

    def kind(self, policy: PolicyName) -> str:
        """The kind of a policy's engines: what they are, and what their processes have."""
        return self._kinds[policy]

    def has_room(self, policy: PolicyName, *, without: Sequence[InferenceEngine] = ()) -> bool:
        """True if one more engine of the policy fits, beside those that are being started."""
        if (shared := self._shared.get(policy)) and shared.has_seat(policy):
            return True
        gone = {self._live[id(engine)].name for engine in without if id(engine) in self._live}
        names = {resident.name for resident in self._live.values()} - gone | {*self._starting}
        if policy in self._modelled:
            return sum(name.policy in self._modelled for name in names) < self._most_modelled
        starting = [spec for name, spec in self._starting.items() if name.policy not in self._modelled]
        asked = self._residents.engine(policy, InstanceId(policy, NOT_STARTED))
        return self._cluster.has_room([*starting, asked], without=gone)

    def _kind(self, policy: PolicyName) -> str:
        spec = self._residents.engine(policy, InstanceId(policy, NOT_STARTED))
        process = f"{spec.ranks} ranks, {spec.devices} GPU, {spec.threads} threads"
        settings = self._settings.policies[policy]
        return f"{kind_of(settings.engine, policy, str(settings.model))}: {process}"


def room_of_a_private_ray(settings: RunSettings, specs: Sequence[ResidentSpec[Any]], *, cores: int) -> int:
    """The number of rooms that a private Ray has a CPU for: those of the run's residents, and those that may be grown.

    `cores` are those of this machine. Residents that take turns share rooms.
    """
    outside = [spec for spec in specs if not spec.in_controller]
    rooms = rooms_of(outside)
    if not settings.balance.grow or not outside:
        return rooms
    if settings.cluster.device != "cpu":
        return rooms + torch.cuda.device_count()  # The accelerators limit it; each needs a CPU.
    at_once = [spec.threads for spec in outside if spec.kind is not ResidentKind.RANK or not spec.takes_turns]
    return rooms + spare_cores(cores, at_once or [spec.threads for spec in outside])


def rooms_of(specs: Sequence[ResidentSpec[Any]]) -> int:
    """The rooms of one machine in which residents find place."""
    return needed(
        RoomRequest(name=spec.name, devices=spec.devices, pool=spec.kind, takes_turns=spec.takes_turns)
        for spec in specs
    )[0]


def growth_note(settings: RunSettings, pool: InferencePool) -> str:
    """Says why nothing can grow now, though the settings ask for it; empty if something can, or nothing is asked."""
    if not settings.balance.grow or any(pool.has_room(PolicyName(name)) for name in settings.trained):
        return ""
    if all(settings.is_modelled(name) for name in settings.trained):
        reason = "simulation.room is 0, so that no modelled engine has room beside the configured ones"
    elif settings.cluster.backend == "ray" and settings.cluster.address == "local":
        reason = (
            f"the configured engines and trainers take all {os.cpu_count()} cores, or accelerators, of this machine"
        )
    else:
        reason = "the configured residents take all room of the pool rollout on the cluster's nodes"
    return f"balance.grow is true, but {reason}; no instance is added until room is free"
