"""The world of a run: the residents of its cluster, and the controller's objects around them. All runs have this one.

residents     what lives outside the controller, and in which cluster: inline or ray in `residents.py`, modelled devices
              in `simulation.py`, scripts in `testing/scripted_run.py`
world_of      spawns them and puts the pool, the residency and the watch for losses around them
open_world    the same for residents that compute
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.residents import open_inline, open_ray
from flexmarl.cluster.interface import Cluster, Resident, ResidentPlace, ResidentSpec
from flexmarl.cluster.own_folder import keep_compiled_code
from flexmarl.config import RunSettings
from flexmarl.events.event import Events
from flexmarl.events.run_events import ProcessStarted
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.interface import InferenceEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup, Residency


class Residents(Protocol):
    """The kinds of residents that a world is made of."""

    @property
    def objects(self) -> ObjectStore:
        """The object store, which holds the weights."""
        ...

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Opens the cluster, with room for so many residents at a time."""
        ...

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[InferenceEngine]:
        """Specifies one inference instance."""
        ...

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Specifies the trainer of a policy."""
        ...

    def replacement_s(self, policy: PolicyName) -> float | None:
        """Returns the modelled seconds until a lost instance is replaced; None if lost ones are not replaced."""
        ...

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns the process groups that share training devices; empty if every trainer has its own."""
        ...


@dataclass(slots=True)
class Processes:
    """Every process that the run has had, by its name."""

    places: dict[WorkerId, ResidentPlace] = field(default_factory=dict)

    def add(self, resident: Resident[Any]) -> None:
        """Adds the process of a resident that has started."""
        self.places[resident.name] = resident.place


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The parts of a run that hold weights, devices or experience."""

    objects: ObjectStore
    store: ExperienceStore
    pool: InferencePool
    trainers: Mapping[PolicyName, Trainer]
    cluster: Cluster
    residency: Residency | None = None
    """Decides which policies hold training devices, if they share any."""
    processes: Processes = field(default_factory=Processes)
    """Processes of its residents; empty if they are objects of this process."""


@asynccontextmanager
async def open_world(
    blueprint: Blueprint, store: ExperienceStore, path: Path | None, events: Events
) -> AsyncIterator[World]:
    """Makes engines and trainers that compute around a store; leaving the block ends them, and closes the store.

    `path` is the store's file, if it has one. Raises ConfigError if the world needs a package that is not installed.
    """
    settings = blueprint.settings
    keep_compiled_code()  # Here, and in the processes that this one starts: they have its environment.
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        if settings.cluster.backend == "inline":
            residents: Residents = stack.enter_context(open_inline(blueprint, store))
        else:
            assert path is not None, "settings of this world that keep the store in memory are refused"
            residents = stack.enter_context(open_ray(blueprint, path))
        yield await stack.enter_async_context(world_of(settings, store, residents, events))


@asynccontextmanager
async def world_of(
    settings: RunSettings,
    store: ExperienceStore,
    residents: Residents,
    events: Events,
    *,
    make_pool: Callable[..., InferencePool] = InferencePool,
) -> AsyncIterator[World]:
    """Spawns a run's residents; leaving the block ends them. The store is the caller's to close.

    Cluster, pool and residency emit to `events` what happens to them.
    """
    served, trained = [PolicyName(name) for name in settings.policies], sorted(map(PolicyName, settings.trained))
    names = {policy: [InstanceId(policy, n) for n in range(settings.policies[policy].instances)] for policy in served}
    engines = [residents.engine(policy, name) for policy in served for name in names[policy]]
    trainers = [residents.trainer(policy) for policy in trained]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(residents.cluster(len(engines) + len(trainers), events))
        processes, remotes = Processes(), dict[WorkerId, Any]()
        for resident in await cluster.spawn([*engines, *trainers]):
            remotes[resident.name] = resident.remote
            if cluster.has_processes:
                processes.add(resident)
        of_policies = {policy: remotes[spec.name] for policy, spec in zip(trained, trainers, strict=True)}
        replaces = all(residents.replacement_s(policy) is not None for policy in served)
        pool = make_pool(
            {policy: [remotes[WorkerId.engine(name)] for name in names[policy]] for policy in served},
            settings.pool,
            respawn=partial(respawn, cluster, residents, processes) if replaces else None,
            events=events,
        )
        groups = residents.process_groups(of_policies)
        yield World(
            objects=residents.objects,
            store=store,
            residency=await stack.enter_async_context(Residency(groups, settings.process_groups, events=events).open())
            if groups
            else None,
            pool=await stack.enter_async_context(pool.open()),
            trainers=of_policies,
            cluster=cluster,
            processes=processes,
        )


async def respawn(
    cluster: Cluster, residents: Residents, processes: Processes, policy: PolicyName, instance: InstanceId
) -> InferenceEngine:
    """Starts an instance in place of a lost one."""
    if seconds := residents.replacement_s(policy):
        await asyncio.sleep(seconds)
    (resident,) = await cluster.spawn([residents.engine(policy, instance)])
    if cluster.has_processes:
        processes.add(resident)
        place = resident.place
        cluster.events.emit(ProcessStarted(process=WorkerId.engine(instance), pid=place.pid, node=place.node))
    return resident.remote
