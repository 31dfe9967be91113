"""Room for engines of a run on its cluster: starts them, ends them, and says whether one more fits.

engines that compute     fit where the nodes of the pool `rollout` have free CPUs and accelerators
modelled, timed engines  take no room on a node: `simulation.room` of them fit beside the configured ones
"""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexmarl.cluster.interface import Cluster, Resident, ResidentSpec
from flexmarl.cluster.placement import spare_cores
from flexmarl.config import RunSettings
from flexmarl.events.run_events import ProcessEnded, ProcessStarted
from flexmarl.inference.interface import InferenceEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import kind_of
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
        self._starting: dict[WorkerId, ResidentSpec[InferenceEngine]] = {}
        self._modelled = frozenset(name for name in settings.policies if settings.is_modelled(name))
        configured = sum(settings.policies[name].instances for name in self._modelled)
        self._most_modelled = configured + settings.simulation.room
        self._kinds = {policy: self._kind(policy) for policy in map(PolicyName, settings.policies)}

    def add(self, resident: Resident[Any]) -> None:
        """Adds an engine that has started."""
        self._live[id(resident.remote)] = resident

    async def start(self, policy: PolicyName, instance: InstanceId) -> InferenceEngine:
        """Starts an engine; simulated ones take their modelled time first. Raises ConfigError if it has no room."""
        spec = self._residents.engine(policy, instance)
        self._starting[spec.name] = spec
        try:
            if seconds := self._residents.replacement_s(policy):
                await asyncio.sleep(seconds)
            (resident,) = await self._cluster.spawn([spec])
            self.add(resident)
        finally:
            del self._starting[spec.name]
        if self._cluster.has_processes and not spec.in_controller:
            self._processes.add(resident)
            place = resident.place
            self._cluster.events.emit(ProcessStarted(process=spec.name, pid=place.pid, node=place.node))
        return resident.remote

    async def end(self, engine: InferenceEngine) -> None:
        """Ends the resident that hosts an engine. An engine that has ended is ignored."""
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
        return f"{kind_of(self._settings.policies[policy].engine, policy)}: {process}"


def room_of_a_private_ray(settings: RunSettings, specs: Sequence[ResidentSpec[Any]], *, cores: int) -> int:
    """The number of residents that a private Ray has a CPU for: those of the run, and those that may be grown.

    `cores` are those of this machine.
    """
    outside = [spec for spec in specs if not spec.in_controller]
    if not settings.balance.grow or not outside:
        return len(outside)
    if settings.cluster.device != "cpu":
        return len(outside) + torch.cuda.device_count()  # The accelerators limit it; each needs a CPU.
    return len(outside) + spare_cores(cores, [spec.threads for spec in outside])


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
