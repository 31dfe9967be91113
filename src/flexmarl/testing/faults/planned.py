"""Runs a plan of faults on a simulated run: `flexmarl simulate CONFIG --faults PLAN`.

consumes     a FaultPlan, and a run before it is wired
waits for    the time of each fault that comes by time; the other faults strike when their target asks for them
produces     the same run, whose engines, trainers, store, tasks and nodes fail as planned
unblocked by time
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from flexmarl.agents import Team
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.world import Residents, World
from flexmarl.cluster.inproc import InprocCluster
from flexmarl.cluster.interface import Cluster, ResidentSpec
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError
from flexmarl.events.event import Events
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.interface import WeightedEngine
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import InstanceId, PolicyName, Task, WorkerId
from flexmarl.simulator.modelled_residents import NODE
from flexmarl.testing.faults.fault_plan import BY_INSTANCE, BY_POLICY, FaultKind, FaultPlan
from flexmarl.testing.faults.faulty import FaultyEngine, FaultySource, FaultyStore, FaultyTrainer
from flexmarl.testing.faults.injection import Injection
from flexmarl.testing.faults.lives import tear
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup


class PlannedFaults:
    """The faults of a simulated run, as a `Disturbance` of flexmarl.assemble.simulation."""

    def __init__(self, plan: FaultPlan) -> None:
        self._injection = Injection(plan)
        self._engines: dict[InstanceId, FaultyEngine] = {}

    def blueprint(self, blueprint: Blueprint) -> Blueprint:
        """Returns the run with poisoned and hung tasks, and a source that may end early."""
        play, injection = blueprint.team.run, self._injection
        hung = set[str]()

        async def run(task: Task, team: Team) -> None:
            if injection.befalls(FaultKind.POISON_TASK, task.input_id):
                raise ValueError("the task is poisoned, as planned")
            if task.input_id not in hung and injection.befalls(FaultKind.HUNG_WORKFLOW, task.input_id):
                hung.add(task.input_id)
                await asyncio.Event().wait()
            await play(task, team)

        source = cast(Any, FaultySource(blueprint.source, injection))
        return replace(blueprint, source=source, team=replace(blueprint.team, run=run))

    def residents(self, residents: Residents) -> Residents:
        """Wraps engines and trainers so that they fail as planned."""
        return FaultyResidents(residents, self._injection, self._engines)

    def store(self, store: ExperienceStore) -> ExperienceStore:
        """Wraps the store so that it fails as planned."""
        return cast(Any, FaultyStore(store, self._injection))

    def begin(self, events: Events, die: Callable[[], None], checkpoints: Path) -> None:
        """Begins a life. If the plan says so, damages the newest checkpoint before the run resumes from it."""
        self._injection.begin(events, die)
        if fault := tear(self._injection, checkpoints):
            self._injection.note(fault)

    async def watch(self, world: World) -> None:
        """Runs the faults that come by time. Lost engines and nodes die in the cluster, which reports their deaths."""
        cluster = cast(InprocCluster, world.cluster)
        live = {resident.name for resident in cluster.residents if resident.alive}

        def lose(instance: InstanceId, because: str) -> None:
            engine = WorkerId.engine(instance)
            if engine in live:
                cluster.kill(engine, because)
            else:
                world.pool.lose(instance, because)

        await self._injection.watch(lambda: cast(Any, self._engines), lose, cluster.kill_node)


class FaultyResidents:
    """Residents whose engines and trainers fail as an injection says."""

    def __init__(self, inner: Residents, injection: Injection, engines: dict[InstanceId, FaultyEngine]) -> None:
        """Enters every engine that is made into `engines`, under its instance."""
        self._inner, self._injection, self._engines = inner, injection, engines

    @property
    def objects(self) -> ObjectStore:
        """The store of weights."""
        return self._inner.objects

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Returns the cluster in which residents live."""
        return self._inner.cluster(residents, events)

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[WeightedEngine]:
        """Returns the spec of an inference instance that fails as planned."""
        spec: Any = self._inner.engine(policy, instance)

        def make() -> Any:
            self._engines[instance] = engine = FaultyEngine(instance, spec.make(), self._injection)
            return engine

        return replace(spec, make=make)

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Returns the spec of a policy's trainer that fails as planned."""
        spec: Any = self._inner.trainer(policy)
        return replace(spec, make=lambda: FaultyTrainer(spec.make(), self._injection))

    def replacement_s(self, policy: PolicyName) -> float | None:
        """Returns what the wrapped residents return."""
        return self._inner.replacement_s(policy)

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns what the wrapped residents return."""
        return self._inner.process_groups(trainers)


def check_fits(plan: FaultPlan, settings: RunSettings, where: str) -> None:
    """Raises ConfigError for a fault that cannot strike in this run; `where` is the plan's file."""
    nodes = [NODE] if settings.simulation.nodes == 1 else [f"{NODE}-{n}" for n in range(settings.simulation.nodes)]
    for place, fault in enumerate(plan.faults):
        policy = fault.instance.policy if fault.kind in BY_INSTANCE else fault.target
        of_policy = fault.kind in (*BY_INSTANCE, *BY_POLICY)
        if fault.kind is FaultKind.ALL_FILTERED:
            problem = "kind: a simulated run has its own workflow's rewards; plan this kind in the campaign only"
        elif fault.kind is FaultKind.LOST_WORKER:
            problem = "kind: the controller plays a simulated run; plan this kind in the campaign only"
        elif fault.kind is FaultKind.LOST_NODE and fault.target not in nodes:
            problem = f"target: there is no node '{fault.target}'; simulation.nodes makes {', '.join(nodes)}"
        elif of_policy and policy not in settings.policies:
            problem = f"target: there is no policy '{policy}'; there are: {', '.join(sorted(settings.policies))}"
        elif fault.kind is FaultKind.TORN_CHECKPOINT and not settings.checkpoint.every:
            problem = "kind: no checkpoint is written; set checkpoint.every"
        else:
            continue
        raise ConfigError(f"{where}: faults[{place}].{problem}")
