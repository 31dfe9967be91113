"""World of modelled devices: what engines and trainers cost is slept in virtual time; nothing is computed.

controller              workflows, store, orchestrator: as in every world
engine/{policy}/{n}     a cost model; what it says comes from a responder, or from a recorded run
trainer/{policy}        a cost model, with one number for weights
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.world import World
from flexmarl.config import RunSettings
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import PolicyName
from flexmarl.simulator.costs import CostSettings, costs_of
from flexmarl.simulator.engine import SimulatedEngine
from flexmarl.simulator.host import Host
from flexmarl.simulator.replies import Responder, responder_of
from flexmarl.simulator.trainer import SimulatedProcessGroup, SimulatedTrainer
from flexmarl.training.residency import Residency


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

    def engine(self, policy: PolicyName) -> SimulatedEngine:
        """One inference instance, which may be moved to another policy."""
        return SimulatedEngine(
            policy,
            self.costs(policy).engine,
            respond=self.respond,
            objects=self.objects,
            host=self.host,
            costs_of=lambda other: self.costs(other).engine,
        )

    def trainer(self, policy: PolicyName) -> SimulatedTrainer:
        """The trainer of a policy."""
        return SimulatedTrainer(policy, self.costs(policy).trainer, self.objects, host=self.host)

    async def respawn(self, policy: PolicyName, instance: str) -> SimulatedEngine:
        """An instance in place of one that was lost."""
        await asyncio.sleep(self.costs(policy).engine.start_s)
        return self.engine(policy)


@asynccontextmanager
async def simulated_world(blueprint: Blueprint, store: ExperienceStore, path: Path | None) -> AsyncIterator[World]:
    """Makes the modelled devices, at once; only replacements take their time to start. For virtual time alone."""
    settings, simulation = blueprint.settings, blueprint.settings.simulation
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        objects = InlineObjectStore()
        recorded = simulation.recorded and settings.path(simulation.recorded)
        models = Models(
            settings=settings,
            objects=objects,
            host=Host(simulation.shared_host),
            respond=responder_of(blueprint.team, simulation.replies, recorded=recorded),
        )
        engines = {
            policy: [models.engine(policy) for _ in range(settings.policies[policy].instances)]
            for policy in map(PolicyName, settings.policies)
        }
        trainers = {policy: models.trainer(policy) for policy in sorted(map(PolicyName, settings.trained))}
        groups = {policy: SimulatedProcessGroup(trainer) for policy, trainer in trainers.items()}
        residency = await stack.enter_async_context(Residency(groups, settings.process_groups))
        pool = await stack.enter_async_context(InferencePool(engines, settings.pool, respawn=models.respawn))
        yield World(objects=objects, store=store, pool=pool, trainers=trainers, residency=residency)
