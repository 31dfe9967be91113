"""Makes the parts of an orchestrator from a run's settings, on any world.

             ┌► feed ─► rollout ─► collector ─► sessions ─► publisher      one `Admission`, `Versions` and `Monitor`
make_parts ──┤                                                             is common to all that look at it
             └► evaluator, balancer

Joins a world's parts to the orchestrator of one run; the same for every world.
"""

import asyncio
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial

from flexmarl.analysis.costs import costs_of
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.world import World
from flexmarl.cluster.interface import ResidentKind
from flexmarl.config import RunSettings
from flexmarl.config.engine_fits import check_engines
from flexmarl.errors import TrainingError
from flexmarl.events.hub import Events
from flexmarl.events.metrics import Metrics
from flexmarl.events.progress import Progress
from flexmarl.events.run_events import ProcessStarted, Resumed, RunStarted, WorkerLost
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.scaling import RULES
from flexmarl.orchestrator.appraisal import Appraisal
from flexmarl.orchestrator.asynchronous import Asynchronous, Stream
from flexmarl.orchestrator.balance import Balancer
from flexmarl.orchestrator.checkpoint import Checkpoints, RunState
from flexmarl.orchestrator.collect import Collector, Release
from flexmarl.orchestrator.crediting import Crediting
from flexmarl.orchestrator.evaluation import Evaluator
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.parts import PRODUCTION, Parts, Rules
from flexmarl.orchestrator.per_policy import PerPolicy
from flexmarl.orchestrator.publish import Gate, Publisher, Updates
from flexmarl.orchestrator.run import Orchestrator, Pipeline
from flexmarl.orchestrator.settings import Mode
from flexmarl.orchestrator.synchronous import Synchronous
from flexmarl.orchestrator.versions import Versions, law_of
from flexmarl.records import CONTROLLER, GroupId, PolicyName, Version, WorkerId
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.player import Player
from flexmarl.rollout.rollout import Rollout
from flexmarl.training.session import TrainingSession


def make_parts(
    blueprint: Blueprint,
    world: World,
    *,
    admission: Admission,
    versions: Versions,
    gate: Gate | None,
    monitor: Monitor,
    checkpoints: Checkpoints,
    events: Events,
    warn: Callable[[str], None],
    rules: Rules,
) -> Parts:
    """All that the orchestrator joins."""
    settings, budget_bytes = blueprint.settings, blueprint.settings.store.budget_bytes
    sessions = make_sessions(settings, world, versions, events)
    crediting = make_crediting(settings, world, admission, monitor, events)
    publisher = Publisher(
        trainers=world.trainers, pool=world.pool, objects=world.objects, versions=versions, events=events
    )
    return Parts(
        feed=Feed(source=blueprint.source, admission=admission, groups=settings.batch.groups, events=events),
        admission=admission,
        rollout=make_rollout(blueprint, world, admission, gate, events, rules),
        crediting=crediting,
        collector=Collector(
            crediting=crediting,
            admission=admission,
            versions=versions,
            release=release_of(settings),
            on_ready=lambda policy: sessions[policy].notify_ready(),
            events=events,
        ),
        trainers=world.trainers,
        sessions=sessions,
        pool=world.pool,
        publisher=publisher,
        updates=Updates(sessions, publisher, monitor=monitor, events=events),
        versions=versions,
        evaluator=make_evaluator(blueprint, world, versions),
        checkpoints=checkpoints,
        events=events,
        monitor=monitor,
        warn=warn,
        prune=None if budget_bytes is None else partial(world.store.prune, budget_bytes=budget_bytes),
        balancer=make_balancer(settings, world, events),
        residency=world.residency,
    )


def make_sessions(
    settings: RunSettings, world: World, versions: Versions, events: Events
) -> Mapping[PolicyName, TrainingSession]:
    """One for each trained policy, at the version that it serves."""
    return {
        policy: TrainingSession(
            policy,
            world.store,
            trainer,
            micro_batch=settings.policies[policy].training.micro_batch,
            version=versions.served[policy],
            ahead=world.cluster.crosses,
            events=events,
            residency=world.residency,
        )
        for policy, trainer in world.trainers.items()
    }


def make_crediting(
    settings: RunSettings, world: World, admission: Admission, monitor: Monitor, events: Events
) -> Crediting:
    """What judges finished groups."""
    return Crediting(
        store=world.store,
        credit=settings.credit,
        trained=[PolicyName(name) for name in settings.trained],
        admission=admission,
        events=events,
        appraisal=make_appraisal(settings, world, events),
        on_report=monitor.credited,
    )


def make_appraisal(settings: RunSettings, world: World, events: Events) -> Appraisal | None:
    """What asks trainers for what credit needs of them; None: the settings need nothing."""
    training = {policy: settings.policies[policy].training for policy in world.trainers}
    if not any(of_policy.needs_appraisal for of_policy in training.values()):
        return None
    return Appraisal(trainers=world.trainers, training=training, events=events)


def make_rollout(
    blueprint: Blueprint, world: World, admission: Admission, gate: Gate | None, events: Events, rules: Rules
) -> Rollout:
    """What plays the training tasks; its calls wait at the gate, if there is one."""
    player = partial(player_of(blueprint, world), store=world.store)
    return rules.rollout(
        player=player(holds=gate.holds) if gate else player(),
        admission=admission,
        settings=blueprint.settings.rollout,
        episodes=blueprint.settings.batch.episodes,
        events=events,
        policies=[agent.policy for agent in blueprint.team.agents.values()],
        greedy="greedy" in blueprint.settings.credit.uses,
    )


def player_of(blueprint: Blueprint, world: World) -> "partial[Player]":
    """A player of the run's team on the world's engines; what it is for is still to be given."""
    settings = blueprint.settings
    return partial(
        Player,
        team=blueprint.team,
        generate=partial(world.pool.generate, timeout_s=settings.rollout.call_timeout_s),
        run_seed=settings.seed,
        timeout_s=settings.rollout.episode_timeout_s,
        grace_s=settings.rollout.cancel_grace_s,
    )


def make_evaluator(blueprint: Blueprint, world: World, versions: Versions) -> Evaluator:
    """The evaluator of a run, on the tasks that it holds out."""
    settings = blueprint.settings
    return Evaluator(
        player=player_of(blueprint, world)(temperature=settings.evaluate.temperature),
        versions=versions,
        tasks=blueprint.source.held_out(settings.evaluate.tasks),
        episodes=settings.evaluate.episodes,
        parallel=settings.rollout.inter_query * settings.rollout.intra_query,
    )


def make_balancer(settings: RunSettings, world: World, events: Events) -> Balancer | None:
    """What moves instances between policies; None if the run has no rule for it."""
    balance = settings.balance
    if balance.rule == "none" and balance.start != "by_share":
        return None
    slots = {policy: slots_of(settings, policy) for policy in map(PolicyName, settings.policies)}
    return Balancer(world.pool, RULES[balance.rule](balance), balance, events, slots=slots)


def slots_of(settings: RunSettings, policy: PolicyName) -> int:
    """Requests that an instance of the policy serves at a time."""
    if settings.cluster.backend == "simulated":
        slots = costs_of(settings.simulation.costs, policy).engine.slots
    else:
        slots = settings.policies[policy].engine.slots
    return min(slots, settings.pool.max_running or slots)


def initial_versions(settings: RunSettings, start: RunState | None) -> dict[PolicyName, Version]:
    """What every policy serves at the start: 0, or what the checkpoint holds."""
    versions = start.versions if start else {}
    return {name: versions.get(name, Version(0)) for name in map(PolicyName, settings.policies)}


def release_of(settings: RunSettings) -> Release:
    """When finished groups become ready, as the mode, determinism and credit ask."""
    if settings.mode in (Mode.SYNC, Mode.COLOCATED):
        return Release.AT_END
    if settings.deterministic:
        return Release.IN_ORDER
    return Release.BY_EPISODE if settings.credit.ready == "trajectory" else Release.AT_ONCE


def wire(
    blueprint: Blueprint,
    world: World,
    *,
    events: Events,
    metrics: Metrics,
    progress: Progress,
    checkpoints: Checkpoints,
    start: RunState | None = None,
    rules: Rules = PRODUCTION,
) -> tuple[Orchestrator, Monitor]:
    """Joins a world's parts to the orchestrator of one run; the same for every world. Called inside the event loop."""
    settings = blueprint.settings
    check_engines(settings, world.pool.capabilities)
    if start:
        tell_resumption(start, events)
    versions = Versions(initial_versions(settings, start))
    monitor = Monitor(
        name=settings.name,
        steps=settings.steps,
        metrics=metrics,
        progress=progress,
        pool=world.pool,
        versions=versions,
        events=events,
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
        events=events,
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
        events=parts.events,
        monitor=parts.monitor,
        window=rules.window,
    )
    if settings.pipeline.updates == "per_policy":
        return PerPolicy(parts, stream, timeout_s=settings.pipeline.policy_timeout_s)
    return Asynchronous(parts, stream)


def tell_resumption(start: RunState, events: Events) -> None:
    """Where the run goes on."""
    events.emit(
        Resumed(
            step=start.step,
            versions=start.versions,
            next_group=GroupId(start.admission.next_group),
            active=start.replayed,
        )
    )


def tell_start(blueprint: Blueprint, world: World, events: Events) -> None:
    """What runs, and in which processes: those that run, and those that will follow."""
    settings, team = blueprint.settings, blueprint.team
    events.emit(
        RunStarted(
            because=team.level.because,
            level=team.level.name,
            seed=settings.seed,
            mode=settings.mode,
            release=release_of(settings),
            chat={agent.policy: agent.renderer.extension.summary for agent in team.agents.values()},
        )
    )

    places = world.processes.places
    here = next((place.node for place in places.values()), platform.node())  # All workers are on this machine.
    events.emit(ProcessStarted(process=CONTROLLER, pid=os.getpid(), node=here))
    for name, place in places.items():
        events.emit(ProcessStarted(process=WorkerId.parse(name), pid=place.pid, node=place.node))


def watch_workers(world: World, events: Events) -> "asyncio.Future[None]":
    """Has the pool give up engines that died; the future fails when a trainer died: its gradients died with it."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lost(worker: WorkerLost) -> None:
        world.processes.places.pop(worker.process, None)
        if worker.process.kind == ResidentKind.ENGINE:
            world.pool.lose(worker.process.instance, worker.because)
        elif not failed.done():
            failed.set_exception(
                TrainingError(
                    f"policy '{worker.process.policy}': the trainer's process (pid {worker.pid} on {worker.node}) "
                    f"died: {worker.because}; go on from the last checkpoint with --resume"
                )
            )

    events.listen(WorkerLost, lost)
    return failed
