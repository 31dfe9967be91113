"""The world of a run: the residents of its cluster, and the controller's objects around them. All runs have this one.

residents     what lives outside the controller, and in which cluster: inline or ray in `residents.py`, modelled devices
              in `simulation.py`, scripts in `testing/scripted_run.py`
world_of      spawns them and puts the pool, the residency and the watch for losses around them
open_world    the same for residents that compute
player_of     plays the run's team on them, in training and in evaluation
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from flexmarl.agents.doors import Doors
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.engine_room import RunEngines, room_of_a_private_ray
from flexmarl.assemble.residents import open_inline, open_ray
from flexmarl.assemble.standing import MakeSpecs, StandingPlace, group_trainers
from flexmarl.cluster.concurrency import task_block
from flexmarl.cluster.interface import Cluster, Resident, ResidentKind, ResidentPlace, ResidentSpec
from flexmarl.cluster.own_folder import keep_compiled_code
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, TrainingError, WorkerError
from flexmarl.events.event import Events
from flexmarl.events.notices import Starting
from flexmarl.events.run_events import ProcessStarted, WorkerLost
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.interface import InferenceEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectStore
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.evaluation import Evaluator, Keep
from flexmarl.orchestrator.publish import Versions
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import InstanceId, PolicyName, Version, WorkerId
from flexmarl.rollout.player import Player
from flexmarl.rollout.remote_player import RemotePlayer, RolloutWorkers
from flexmarl.rollout.worker import RolloutWorker
from flexmarl.tools.open_tools import RunningCalls
from flexmarl.training.colocated import ColocatedResidency
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup, Residency
from flexmarl.training.together import SharedBase, Together


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
    """The live processes of the run's residents, by name. `watch_workers` removes those that are lost."""

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
    running: RunningCalls
    """The places for tool calls."""
    workers: RolloutWorkers | None = None
    """Plays the episodes; None: the controller does."""
    doors: Doors | None = None
    """The gateway, if the run has one."""
    residency: Residency | None = None
    """Decides which policies hold training devices, if they share any."""
    colocated: ColocatedResidency | None = None
    """The same part where they share them with the engines, in mode `colocated`."""
    together: Mapping[PolicyName, Together] = field(default_factory=dict)
    """For each policy that is trained together with others, the part that joins them."""
    processes: Processes = field(default_factory=Processes)
    """Processes of its residents; empty if they are objects of this process."""
    survives_ranks: bool = False
    """True if the state of every policy comes back after the loss of a rank (process_groups.keep_updated)."""


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
            residents = stack.enter_context(open_inline(blueprint, store))
        else:
            assert path is not None, "settings of this world that keep the store in memory are refused"
            residents = stack.enter_context(open_ray(blueprint, path))
        world = world_of(
            settings,
            store,
            residents,
            events,
            services=residents.services,
            players=residents.rollout_workers(),
            places=residents.places(),
            bases=residents.bases(),
        )
        opened = await stack.enter_async_context(world)
        if gateway := settings.wanted_gateway:
            from flexmarl.assemble.opened_gateway import opened_gateway

            doors = await stack.enter_async_context(
                opened_gateway(blueprint, gateway, events, path.parent if path else None)
            )
            opened = replace(opened, doors=doors)
        yield opened


@asynccontextmanager
async def world_of(
    settings: RunSettings,
    store: ExperienceStore,
    residents: Residents,
    events: Events,
    *,
    make_pool: Callable[..., InferencePool] = InferencePool,
    services: Callable[[Cluster], Sequence[ResidentSpec[Any]]] = lambda cluster: [],
    players: Sequence[ResidentSpec[RolloutWorker]] = (),
    places: Sequence[MakeSpecs] = (),
    bases: Sequence[ResidentSpec[SharedBase]] = (),
) -> AsyncIterator[World]:
    """Spawns a run's residents; leaving the block ends them. The store is the caller's to close.

    `services` specifies what they need on the open cluster; a service that is lost is started anew.
    `players` are the rollout workers; without any, the controller plays.
    `places` are those on which policies train, in turns or with several ranks; without any, each has a trainer of its
    own.
    `bases` are the trainers of policies that are trained together.
    Cluster, pool and residency emit to `events` what happens to them.
    """
    served, trained = [PolicyName(name) for name in settings.policies], sorted(map(PolicyName, settings.trained))
    names = {policy: [InstanceId(policy, n) for n in range(settings.policies[policy].instances)] for policy in served}
    engines = [residents.engine(p, name) for p in served if settings.together(p)[0] == p for name in names[p]]
    alone = [policy for policy in trained if not places and policy not in chain(*settings.trained_together)]
    trainers = [*bases, *map(residents.trainer, alone)]
    async with AsyncExitStack() as stack:
        if settings.cluster.backend == "ray":
            events.emit(Starting(waits_for="starting Ray"))
        processes, remotes = Processes(), dict[WorkerId, Any]()
        standing = [StandingPlace(make_specs, processes) for make_specs in places]
        specs = [*engines, *trainers, *(spec for place in standing for spec in place.specs), *players]
        room = room_of_a_private_ray(settings, specs, cores=os.cpu_count() or 1)
        cluster = await stack.enter_async_context(residents.cluster(room, events))
        events.emit(Starting(waits_for=_loading(settings, specs)))
        await stack.enter_async_context(kept_alive(cluster, services(cluster), processes))
        running = RunEngines(settings, cluster, residents, processes)
        workers = await stack.enter_async_context(open_workers(settings, cluster, players, processes))
        spawned = await cluster.spawn(specs)
        for place in standing:
            place.stand(cluster, spawned)
        for spec, resident in zip(specs, spawned, strict=True):
            remotes[resident.name] = resident.remote
            _hand_over(resident, spec.kind, running, workers)
            if cluster.has_processes and not spec.in_controller:
                processes.add(resident)
        together = await stack.enter_async_context(opened_together(settings, bases, remotes, events))
        of_policies, groups = trainers_on(settings, residents, trained, remotes, standing, together)
        replaces = all(residents.replacement_s(policy) is not None for policy in served)
        pool = make_pool(
            {p: [await running.view(name) or remotes[WorkerId.engine(name)] for name in names[p]] for p in served},
            settings.pool,
            respawn=running.start if replaces else None,
            room=running,
            events=events,
        )
        residency = await stack.enter_async_context(opened_residency(settings, groups, pool, events))
        yield World(
            objects=residents.objects,
            store=store,
            residency=residency,
            colocated=residency if isinstance(residency, ColocatedResidency) else None,
            pool=await stack.enter_async_context(pool.open()),
            trainers=of_policies,
            together=together,
            cluster=cluster,
            processes=processes,
            running=RunningCalls(settings.rollout.tool_calls_at_once),
            workers=workers,
            survives_ranks=bool(places) and settings.keeps_updated,
        )


def _hand_over(
    resident: Resident[Any], kind: ResidentKind, running: RunEngines, workers: RolloutWorkers | None
) -> None:
    """Gives a resident to the part that looks after its kind."""
    if kind is ResidentKind.ENGINE:
        running.add(resident)
    elif workers is not None and kind is ResidentKind.ROLLOUT:
        workers.add(resident)


@asynccontextmanager
async def opened_together(
    settings: RunSettings, bases: Sequence[ResidentSpec[SharedBase]], remotes: Mapping[WorkerId, Any], events: Events
) -> AsyncIterator[Mapping[PolicyName, Together]]:
    """Joins the policies that are trained together, for the length of a block."""
    found: dict[PolicyName, Together] = {}
    async with AsyncExitStack() as stack:
        for base, names in zip(bases, settings.trained_together, strict=True):
            policies = [PolicyName(name) for name in names]
            together = Together(remotes[base.name], policies, in_rounds=settings.deterministic, events=events)
            found |= dict.fromkeys(policies, await stack.enter_async_context(together.open()))
        yield found


def trainers_on(
    settings: RunSettings,
    residents: Residents,
    trained: Sequence[PolicyName],
    remotes: Mapping[WorkerId, Any],
    places: Sequence[StandingPlace],
    together: Mapping[PolicyName, Together],
) -> tuple[Mapping[PolicyName, Trainer], Mapping[PolicyName, ProcessGroup]]:
    """The trainer of each policy, and its process group if it may leave its devices: on `places`, if there are any."""
    if places:
        groups = group_trainers(settings, trained, places, residents.objects)
        return groups, groups
    trainers = {
        policy: together[policy].trainers[policy] if policy in together else remotes[WorkerId.trainer(policy)]
        for policy in trained
    }
    return trainers, residents.process_groups(trainers)


@asynccontextmanager
async def opened_residency(
    settings: RunSettings, groups: Mapping[PolicyName, ProcessGroup], pool: InferencePool, events: Events
) -> AsyncIterator[Residency | None]:
    """Shares training devices inside the block: between policies, if they share any, and in turn with the engines."""
    if settings.mode is Mode.COLOCATED:
        async with ColocatedResidency(groups, settings.process_groups, engines=pool, events=events).open() as residency:
            yield residency
    elif groups:
        async with Residency(groups, settings.process_groups, events=events).open() as residency:
            yield residency
    else:
        yield None


def _loading(settings: RunSettings, specs: Sequence[ResidentSpec[Any]]) -> str:
    models = ", ".join(dict.fromkeys(str(policy.model) for policy in settings.policies.values()))
    names = {
        ResidentKind.ENGINE: "engine",
        ResidentKind.TRAINER: "trainer",
        ResidentKind.RANK: "training process",
        ResidentKind.ROLLOUT: "rollout worker",
    }
    counts = Counter(spec.kind for spec in specs)
    loaded = [f"{count} {names[kind]}{'' if count == 1 else 's'}" for kind, count in counts.items()]
    return f"loading {models}: {', '.join(loaded)}"


@asynccontextmanager
async def open_workers(
    settings: RunSettings, cluster: Cluster, players: Sequence[ResidentSpec[RolloutWorker]], processes: Processes
) -> AsyncIterator[RolloutWorkers | None]:
    """Opens the rollout workers of a run, which replace those that are lost. Yields None if the run has none."""
    if not players:
        yield None
        return

    async def spawn(worker: WorkerId) -> Resident[RolloutWorker]:
        (resident,) = await cluster.spawn([spec for spec in players if spec.name == worker])
        processes.add(resident)
        place = resident.place
        cluster.events.emit(ProcessStarted(process=resident.name, pid=place.pid, node=place.node))
        return resident

    stuck_s = settings.rollout.episode_timeout_s + settings.rollout.cancel_grace_s
    async with RolloutWorkers(spawn, stuck_s=stuck_s, events=cluster.events).open() as workers:
        yield workers


@asynccontextmanager
async def kept_alive(
    cluster: Cluster, services: Sequence[ResidentSpec[Any]], processes: Processes
) -> AsyncIterator[None]:
    """Spawns services for the length of a block, and starts each anew whenever it is lost."""
    specs = {spec.name: spec for spec in services}

    async def start(*started: ResidentSpec[Any]) -> None:
        for resident in await cluster.spawn(started):
            processes.add(resident)

    async def restart(spec: ResidentSpec[Any]) -> None:
        with suppress(
            WorkerError, ConfigError
        ):  # The cluster has ended, or its node: whoever calls the service is told.
            await start(spec)
            place = processes.places[spec.name]
            cluster.events.emit(ProcessStarted(process=spec.name, pid=place.pid, node=place.node))

    await start(*services)
    async with task_block() as tasks:

        def lost(worker: WorkerLost) -> None:
            if spec := specs.get(worker.process):
                tasks.create_task(restart(spec), name=f"restart {spec.name}")

        cluster.events.listen(WorkerLost, lost)
        yield
        specs.clear()


def player_of(blueprint: Blueprint, world: World) -> "partial[Player]":
    """Returns a player of the run's team on the world's engines. Training and evaluation add their own arguments."""
    settings = blueprint.settings
    return partial(
        partial(RemotePlayer, workers=world.workers) if world.workers else partial(Player, doors=world.doors),
        team=blueprint.team,
        generate=partial(world.pool.generate, timeout_s=settings.rollout.call_timeout_s),
        run_seed=settings.seed,
        timeout_s=settings.rollout.episode_timeout_s,
        grace_s=settings.rollout.cancel_grace_s,
        running=world.running,
        events=world.pool.events,
    )


def make_evaluator(blueprint: Blueprint, world: World, versions: Versions, keep: Keep | None = None) -> Evaluator:
    """Makes the evaluator of a run, for its held-out tasks. `keep` keeps what it plays."""
    settings = blueprint.settings
    return Evaluator(
        player=player_of(blueprint, world)(temperature=settings.evaluate.temperature),
        versions=versions,
        tasks=blueprint.source.held_out(settings.evaluate.tasks),
        episodes=settings.evaluate.episodes,
        parallel=settings.rollout.inter_query * settings.rollout.intra_query,
        keep=keep,
    )


def initial_versions(settings: RunSettings, start: RunState | None) -> dict[PolicyName, Version]:
    """Returns the version that each policy serves at the start: that of the checkpoint, else 0."""
    versions = start.versions if start else {}
    return {name: versions.get(name, Version(0)) for name in map(PolicyName, settings.policies)}


def watch_workers(world: World, events: Events) -> "asyncio.Future[None]":
    """Makes the pool give up engines that die. Returns a future that fails if a trainer dies, with its gradients."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lost(worker: WorkerLost) -> None:
        world.processes.places.pop(worker.process, None)
        if worker.process.kind == ResidentKind.ENGINE:
            world.pool.lose(worker.process.instance, worker.because)
        elif worker.process.kind == ResidentKind.TRAINER and not failed.done():
            shared = world.together.get(worker.process.policy)
            policies = ", ".join(f"'{policy}'" for policy in (shared.trainers if shared else [worker.process.policy]))
            failed.set_exception(
                TrainingError(
                    f"policy {policies}: the trainer's process (pid {worker.pid} on {worker.node}) "
                    f"died: {worker.because}; go on from the last checkpoint with --resume"
                )
            )
        elif worker.process.kind == ResidentKind.RANK and not failed.done() and not world.survives_ranks:
            failed.set_exception(
                TrainingError(
                    f"{worker.process}: the training process of a place (pid {worker.pid} on {worker.node}) died: "
                    f"{worker.because}; go on from the last checkpoint with --resume"
                )
            )

    events.listen(WorkerLost, lost)
    return failed
