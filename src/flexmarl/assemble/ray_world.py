"""World of processes on one machine: an actor for each engine and trainer, weights in the shared memory between them.

controller              workflows, the store's writer, the orchestrator
engine/{policy}/{n}     one inference instance each; gets weights from shared memory
trainer/{policy}        one trainer each; reads its rows from the store's file, sets weights in shared memory
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from flexmarl.agents import ChatRenderer
from flexmarl.assemble.blueprint import Blueprint, load_tokenizer, model_source
from flexmarl.assemble.trainer import make_trainer
from flexmarl.assemble.world import Processes, World, settle_memory
from flexmarl.cluster.backends.ray import RayCluster
from flexmarl.cluster.interface import Cluster, WorkerRole, WorkerSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.priority import give_way
from flexmarl.config import RunSettings
from flexmarl.experience.backends.durable import DurableStore
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.backends.host import EngineHost, host_engine
from flexmarl.inference.backends.remote import RemoteEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.shm import ShmObjectStore
from flexmarl.records import PolicyName
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.host import TrainerHost, host_trainer
from flexmarl.training.backends.remote import RemoteTrainer


@dataclass(frozen=True, slots=True)
class Plans:
    """What each process is to hold; a plan is carried out in that process."""

    settings: RunSettings
    objects: ShmObjectStore
    store: Path

    def engine(self, policy: PolicyName, instance: str) -> WorkerSpec:
        """One inference instance, named `{policy}/{number}`."""
        threads = getattr(self.settings.policies[policy].engine, "threads", None)
        return self._spec(f"engine/{instance}", WorkerRole.ENGINE, partial(make_engine_host, self, policy), threads)

    def trainer(self, policy: PolicyName) -> WorkerSpec:
        """The trainer of a policy."""
        return self._spec(f"trainer/{policy}", WorkerRole.TRAINER, partial(make_trainer_host, self, policy))

    def instances(self, policy: PolicyName) -> list[str]:
        """Names of the instances that a policy begins with."""
        return [f"{policy}/{number}" for number in range(self.settings.policies[policy].instances)]

    def _spec(self, name: str, role: WorkerRole, make: Callable[[], object], threads: int | None = None) -> WorkerSpec:
        cluster = self.settings.cluster
        return WorkerSpec(
            name=name, role=role, make=make, device=cluster.device, threads=threads or cluster.threads or 1
        )


@asynccontextmanager
async def ray_world(blueprint: Blueprint, store: ExperienceStore, path: Path | None) -> AsyncIterator[World]:
    """Starts the processes; leaving the block ends them, whatever happened inside."""
    settings = blueprint.settings
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        assert path is not None, "settings of this world that keep the store in memory are refused"
        leases = stack.enter_context(RunLeases(settings.name))
        objects = ShmObjectStore(leases.shared_memory())
        objects.create()
        plans = Plans(settings, objects, path)
        served, trained = [PolicyName(name) for name in settings.policies], sorted(map(PolicyName, settings.trained))
        specs = [plans.engine(policy, instance) for policy in served for instance in plans.instances(policy)]
        specs += [plans.trainer(policy) for policy in trained]
        cluster = await stack.enter_async_context(RayCluster(settings.cluster, leases=leases, workers=len(specs)))
        processes = Processes()
        workers = {worker.name: worker for worker in await cluster.spawn(specs)}
        for worker in workers.values():
            processes.add(worker)
        engines = {
            policy: [RemoteEngine(workers[f"engine/{instance}"], policy) for instance in plans.instances(policy)]
            for policy in served
        }
        trainers = {policy: RemoteTrainer(workers[f"trainer/{policy}"], policy) for policy in trained}
        pool = InferencePool(engines, settings.pool, respawn=partial(respawn, cluster, plans, processes))
        yield World(
            objects=objects,
            store=store,
            pool=await stack.enter_async_context(pool),
            trainers=trainers,
            accumulate={policy: trainer.accumulate_rows for policy, trainer in trainers.items()},
            cluster=cluster,
            processes=processes,
        )


async def respawn(
    cluster: Cluster, plans: Plans, processes: Processes, policy: PolicyName, instance: str
) -> RemoteEngine:
    """An instance in place of one that was lost."""
    (worker,) = await cluster.spawn([plans.engine(policy, instance)])
    processes.add(worker)
    return RemoteEngine(worker, policy)


def make_engine_host(plans: Plans, policy: PolicyName) -> EngineHost:
    """In the engine's process: the engine with its model."""
    transformers_logging.disable_progress_bar()
    settings = plans.settings
    host = host_engine(
        settings.policies[policy].engine,
        policy=policy,
        make_model=partial(load_model, model_source(settings, policy)),
        make_decode=lambda: ChatRenderer(load_tokenizer(settings, policy)).decode,
        make_store=lambda: plans.objects,
        device=local_device(settings),
        deterministic=settings.deterministic,
    )
    settle_memory()
    return host


def make_trainer_host(plans: Plans, policy: PolicyName) -> TrainerHost:
    """In the trainer's process: the trainer with its model, beside a client of the store."""
    transformers_logging.disable_progress_bar()
    settings = plans.settings
    torch.manual_seed(settings.seed)
    host = host_trainer(
        policy=policy,
        make_trainer=lambda thread: make_trainer(
            settings, policy, plans.objects, thread=thread, device=local_device(settings)
        ),
        open_store=partial(DurableStore.join, plans.store),
    )
    settle_memory()
    if settings.cluster.device == "cpu":
        give_way()  # Only now: until it is made, the whole run waits for it.
    return host


def local_device(settings: RunSettings) -> str:
    """The device as a worker sees it: of accelerators, each sees one."""
    return "cpu" if settings.cluster.device == "cpu" else "cuda:0"
