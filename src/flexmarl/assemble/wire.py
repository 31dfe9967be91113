"""Makes the orchestrator of one run from its settings and the parts of a world. Every world is wired in the same way.

             ┌► feed ─► rollout ─► collector ─► sessions ─► publisher      all parts share one `Admission`,
make_parts ──┤                                                             one `Versions` and one `Monitor`
             └► evaluator, balancer
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
from flexmarl.events.event import Events
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
from flexmarl.records import CONTROLLER, GroupId, PolicyName, Version
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
    """Makes all parts that the orchestrator joins."""
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
    """Makes a training session for each trained policy, at the version that the policy serves."""
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
    """Makes the part that computes the credit of finished groups."""
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
    """Makes the part that gets the inputs of credit from trainers. Returns None if no setting needs any."""
    training = {policy: settings.policies[policy].training for policy in world.trainers}
    if not any(of_policy.needs_appraisal for of_policy in training.values()):
        return None
    return Appraisal(trainers=world.trainers, training=training, events=events)


def make_rollout(
    blueprint: Blueprint, world: World, admission: Admission, gate: Gate | None, events: Events, rules: Rules
) -> Rollout:
    """Makes the part that plays training tasks. Its calls wait at the gate, if there is one."""
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
    """Returns a player of the run's team on the world's engines. Training and evaluation add their own arguments."""
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
    """Makes the evaluator of a run, for its held-out tasks."""
    settings = blueprint.settings
    return Evaluator(
        player=player_of(blueprint, world)(temperature=settings.evaluate.temperature),
        versions=versions,
        tasks=blueprint.source.held_out(settings.evaluate.tasks),
        episodes=settings.evaluate.episodes,
        parallel=settings.rollout.inter_query * settings.rollout.intra_query,
    )


def make_balancer(settings: RunSettings, world: World, events: Events) -> Balancer | None:
    """Makes the part that moves instances between policies. Returns None if the settings never move any."""
    balance = settings.balance
    if balance.rule == "none" and balance.start != "by_share":
        return None
    slots = {policy: slots_of(settings, policy) for policy in map(PolicyName, settings.policies)}
    return Balancer(world.pool, RULES[balance.rule](balance), balance, events, slots=slots)


def slots_of(settings: RunSettings, policy: PolicyName) -> int:
    """Returns the number of requests that an instance of the policy serves at a time."""
    if settings.cluster.backend == "simulated":
        slots = costs_of(settings.simulation.costs, policy).engine.slots
    else:
        slots = settings.policies[policy].engine.slots
    return min(slots, settings.pool.max_running or slots)


def initial_versions(settings: RunSettings, start: RunState | None) -> dict[PolicyName, Version]:
    """Returns the version that each policy serves at the start: that of the checkpoint, else 0."""
    versions = start.versions if start else {}
    return {name: versions.get(name, Version(0)) for name in map(PolicyName, settings.policies)}


def release_of(settings: RunSettings) -> Release:
    """Returns the moment when finished groups become ready. Mode, `deterministic` and `credit.ready` decide it."""
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
    """Makes the orchestrator and the monitor of one run on a world. Call it inside the event loop.

    `start` is the state that a resumed run continues from. `rules` replaces rules of production in tests.
    Raises ConfigError if the engines cannot do what the settings need.
    """
    settings = blueprint.settings
    check_engines(settings, world.pool.capabilities)
    if start:
        emit_resumption(start, events)
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
    """Makes the pipeline that makes steps in the run's mode."""
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


def emit_resumption(start: RunState, events: Events) -> None:
    """Emits the step, the versions and the groups with which the run is resumed."""
    events.emit(
        Resumed(
            step=start.step,
            versions=start.versions,
            next_group=GroupId(start.admission.next_group),
            active=start.replayed,
        )
    )


def emit_start(blueprint: Blueprint, world: World, events: Events) -> None:
    """Emits what the run is, and a `ProcessStarted` for the controller and for each worker process."""
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
    node = next((place.node for place in places.values()), platform.node())  # All workers are on this machine.
    events.emit(ProcessStarted(process=CONTROLLER, pid=os.getpid(), node=node))
    for name, place in places.items():
        events.emit(ProcessStarted(process=name, pid=place.pid, node=place.node))


def watch_workers(world: World, events: Events) -> "asyncio.Future[None]":
    """Makes the pool give up engines that die. Returns a future that fails if a trainer dies, with its gradients."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_lost(worker: WorkerLost) -> None:
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

    events.listen(WorkerLost, on_lost)
    return failed
