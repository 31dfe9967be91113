"""World of modelled devices: what engines and trainers cost is slept in virtual time; nothing is computed.

controller              workflows, store, orchestrator: as in every world
engine/{policy}/{n}     a cost model; what it says comes from a responder, or from a recorded run
trainer/{policy}        a cost model, with one number for weights
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.world import Processes, World
from flexmarl.cluster.interface import WorkerRole, WorkerSpec
from flexmarl.config import RunSettings
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import PolicyName
from flexmarl.simulator.cluster import SimulatedCluster
from flexmarl.simulator.costs import CostSettings, costs_of
from flexmarl.simulator.engine import SimulatedEngine
from flexmarl.simulator.host import Host
from flexmarl.simulator.objects import SimulatedObjectStore
from flexmarl.simulator.replies import Responder, responder_of
from flexmarl.simulator.trainer import SimulatedProcessGroup, SimulatedTrainer
from flexmarl.training.residency import Residency

NODE = "simulated"
"""Where all workers are."""


@dataclass(frozen=True, slots=True)
class Models:
    """What each simulated process holds."""

    settings: RunSettings
    objects: ObjectStore
    host: Host
    respond: Responder

    def costs(self, policy: PolicyName) -> CostSettings:
        """Of a policy's devices."""
        return costs_of(self.settings.simulation.costs, policy)

    def engine(self, policy: PolicyName, instance: str) -> WorkerSpec:
        """One inference instance, which may be moved to another policy."""
        make = partial(
            SimulatedEngine,
            policy,
            self.costs(policy).engine,
            respond=self.respond,
            objects=self.objects,
            host=self.host,
            costs_of=lambda other: self.costs(other).engine,
        )
        return WorkerSpec(name=f"engine/{instance}", role=WorkerRole.ENGINE, make=make)

    def trainer(self, policy: PolicyName) -> WorkerSpec:
        """The trainer of a policy."""
        make = partial(SimulatedTrainer, policy, self.costs(policy).trainer, self.objects, host=self.host)
        return WorkerSpec(name=f"trainer/{policy}", role=WorkerRole.TRAINER, make=make)


@asynccontextmanager
async def simulated_world(blueprint: Blueprint, store: ExperienceStore, path: Path | None) -> AsyncIterator[World]:
    """Makes the modelled devices, at once; only replacements take their time to start. For virtual time alone."""
    settings, simulation = blueprint.settings, blueprint.settings.simulation
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        objects = SimulatedObjectStore()
        recorded = simulation.recorded and settings.path(simulation.recorded)
        respond = responder_of(blueprint.team, simulation.replies, recorded=recorded)
        models = Models(settings=settings, objects=objects, host=Host(simulation.shared_host), respond=respond)
        instances = {PolicyName(name): range(policy.instances) for name, policy in settings.policies.items()}
        trained = sorted(map(PolicyName, settings.trained))
        specs = [models.engine(policy, f"{policy}/{n}") for policy, numbers in instances.items() for n in numbers]
        specs += [models.trainer(policy) for policy in trained]
        spare = settings.pool.replacements * len(instances)
        cluster = await stack.enter_async_context(SimulatedCluster({NODE: len(specs) + spare}))
        await cluster.spawn(specs)
        processes = Processes()
        for worker in cluster.workers:
            processes.add(worker)
        hosted = {worker.name: worker.hosted for worker in cluster.workers}
        engines = {policy: [hosted[f"engine/{policy}/{n}"] for n in numbers] for policy, numbers in instances.items()}
        trainers = {policy: hosted[f"trainer/{policy}"] for policy in trained}
        groups = {policy: SimulatedProcessGroup(trainer) for policy, trainer in trainers.items()}
        pool = InferencePool(engines, settings.pool, respawn=partial(respawn, cluster, models, processes))
        yield World(
            objects=objects,
            store=store,
            residency=await stack.enter_async_context(Residency(groups, settings.process_groups)),
            pool=await stack.enter_async_context(pool),
            trainers=trainers,
            cluster=cluster,
            processes=processes,
        )


async def respawn(
    cluster: SimulatedCluster, models: Models, processes: Processes, policy: PolicyName, instance: str
) -> SimulatedEngine:
    """An instance in place of one that was lost."""
    await asyncio.sleep(models.costs(policy).engine.start_s)
    await cluster.spawn([models.engine(policy, instance)])
    worker = cluster.workers[-1]
    processes.add(worker)
    return worker.hosted
