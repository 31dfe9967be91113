"""Joins a world's parts to the orchestrator of one run; the same for every world."""

import asyncio
import os
import platform
from functools import partial

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.parts import initial_versions, make_parts, release_of
from flexmarl.assemble.world import World
from flexmarl.cluster.interface import ResidentKind, ResidentPlace
from flexmarl.config import RunSettings
from flexmarl.config.engine_fits import check_engines
from flexmarl.errors import TrainingError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.observability.journal import Journal
from flexmarl.observability.metrics import Metrics
from flexmarl.observability.progress import Progress
from flexmarl.orchestrator.asynchronous import Asynchronous, Stream
from flexmarl.orchestrator.checkpoint import Checkpoints, RunState
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.parts import PRODUCTION, Parts, Rules
from flexmarl.orchestrator.per_policy import PerPolicy
from flexmarl.orchestrator.pool_journal import journal_pool
from flexmarl.orchestrator.publish import Gate
from flexmarl.orchestrator.run import Orchestrator, Pipeline
from flexmarl.orchestrator.settings import Mode
from flexmarl.orchestrator.synchronous import Synchronous
from flexmarl.orchestrator.versions import Versions, law_of
from flexmarl.records import WorkerLost
from flexmarl.training.residency import Swapped


def wire(
    blueprint: Blueprint,
    world: World,
    *,
    journal: Journal,
    metrics: Metrics,
    progress: Progress,
    checkpoints: Checkpoints,
    start: RunState | None = None,
    rules: Rules = PRODUCTION,
) -> tuple[Orchestrator, Monitor]:
    """Joins a world's parts to the orchestrator of one run; the same for every world. Called inside the event loop."""
    settings = blueprint.settings
    check_engines(settings, world.pool.capabilities)
    journal_world(world, journal)
    if start:
        journal_resumption(start, journal)
    versions = Versions(initial_versions(settings, start))
    monitor = Monitor(
        name=settings.name,
        steps=settings.steps,
        metrics=metrics,
        progress=progress,
        pool=world.pool,
        versions=versions,
        journal=journal,
        processes=lambda: len(world.processes.places) + 1 if world.processes.places else 0,
    )
    gate = rules.gate() if settings.pipeline.ahead and settings.mode.synchronous else None
    law = law_of(settings.mode, settings.pipeline, groups=settings.batch.groups)
    parts = make_parts(
        blueprint,
        world,
        admission=rules.admission.resumed(law, start.admission) if start else rules.admission(law),
        versions=versions,
        gate=gate,
        monitor=monitor,
        checkpoints=checkpoints,
        journal=journal,
        warn=progress.note,
        rules=rules,
    )
    orchestrator = Orchestrator(
        parts,
        pipeline_of(settings, parts, world.store, gate, rules),
        steps=settings.steps,
        evaluate=settings.evaluate,
        checkpoint=settings.checkpoint,
        start=start,
    )
    return orchestrator, monitor


def pipeline_of(
    settings: RunSettings, parts: Parts, store: ExperienceStore, gate: Gate | None, rules: Rules
) -> Pipeline:
    """How the run's mode makes steps."""
    if settings.mode.synchronous:
        return Synchronous(parts, colocated=settings.mode is Mode.COLOCATED, gate=gate)
    stream = Stream(
        feed=parts.feed,
        rollout=parts.rollout,
        crediting=parts.crediting,
        admission=parts.admission,
        store=store,
        settings=settings.pipeline,
        retries=settings.rollout.group_retries,
        journal=parts.journal,
        monitor=parts.monitor,
        window=rules.window,
    )
    if settings.pipeline.updates == "per_policy":
        return PerPolicy(parts, stream, timeout_s=settings.pipeline.policy_timeout_s)
    return Asynchronous(parts, stream)


def journal_world(world: World, journal: Journal) -> None:
    """From now on engines and training devices report to the journal."""
    journal_pool(world.pool, journal)
    if world.residency:
        world.residency.on_swap = partial(journal_swap, journal)


def journal_resumption(start: RunState, journal: Journal) -> None:
    """Where the run goes on."""
    journal.event(
        "resumed",
        step=start.step,
        versions=start.versions,
        next_group=start.admission.next_group,
        active=start.replayed,
    )


def journal_swap(journal: Journal, swapped: Swapped) -> None:
    """A policy's training state came onto devices, or was set aside."""
    journal.event(
        "swapped",
        process=f"{ResidentKind.TRAINER}/{swapped.policy}",
        began=journal.moment(swapped.began),
        ended=journal.moment(swapped.ended),
        policy=swapped.policy,
        direction=swapped.direction,
        place=swapped.place,
        because=swapped.because,
    )


def journal_start(blueprint: Blueprint, world: World, journal: Journal) -> None:
    """What runs, and in which processes: those that run, and those that will follow."""
    settings, team = blueprint.settings, blueprint.team
    journal.event(
        "run_started",
        because=team.level.because,
        level=team.level.name,
        seed=settings.seed,
        mode=settings.mode,
        release=release_of(settings),
        chat={agent.policy: agent.renderer.extension.summary for agent in team.agents.values()},
    )

    def started(name: str, place: ResidentPlace) -> None:
        journal.event("process_started", process=name, pid=place.pid, node=place.node)

    places = world.processes.places
    here = next((place.node for place in places.values()), platform.node())  # All workers are on this machine.
    started("controller", ResidentPlace(node=here, pid=os.getpid()))
    for name, place in places.items():
        started(name, place)
    world.processes.on_started = started


def watch_workers(world: World, journal: Journal) -> "asyncio.Future[None]":
    """Tells the pool of engines that died; the future fails when a trainer died, since its gradients died with it."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lost(worker: WorkerLost) -> None:
        journal.event("worker_lost", process=worker.name, node=worker.node, pid=worker.pid, because=worker.because)
        world.processes.places.pop(worker.name, None)
        role, _, name = worker.name.partition("/")
        if role == ResidentKind.ENGINE:
            world.pool.lose(name, worker.because)
        elif not failed.done():
            failed.set_exception(
                TrainingError(
                    f"policy '{name}': the trainer's process (pid {worker.pid} on {worker.node}) died: "
                    f"{worker.because}; go on from the last checkpoint with --resume"
                )
            )

    world.cluster.on_lost = lost
    return failed
