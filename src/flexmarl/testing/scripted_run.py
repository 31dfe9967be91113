"""A whole scripted run: the production loops on fake engines and trainers, in virtual time.

    run = ScriptedRun(my_workflow, lambda prompt, request: "42", steps=3, batch={"groups": 4, "episodes": 2}).play()
    assert run.trainers["solver"].version == 3
    assert {row.state for row in run.rows()} == {RowState.TRAINED}

Tasks, engines and trainers are fakes. Feed, rollout, player, store, collector, sessions, publisher, evaluator and
checkpoints are those of every run. An idle hour costs nothing, and a wait without end raises DeadlockError.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from flexmarl.agents import ChatRenderer, Team, TeamSpec, Workflow, workflow
from flexmarl.agents.characters import END, character_renderer
from flexmarl.agents.doors import Doors
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.wire import PRODUCTION, wire
from flexmarl.assemble.world import Residents, World, world_of
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.config import RunSettings
from flexmarl.errors import EngineError, TrainingError
from flexmarl.events.event import Events
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.metrics import Metrics
from flexmarl.events.progress import NullProgress, Progress
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import ExperienceStore, Row
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.inference.interface import WeightedEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.orchestrator.run import RunOutcome, StopRequest
from flexmarl.orchestrator.saving import Checkpoints, resume
from flexmarl.records import GenerationRequest, InstanceId, PolicyName, Task, WorkerId
from flexmarl.rollout.worker import RolloutWorker
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.agents import Script
from flexmarl.testing.faults.watched import WatchedCache, WatchedEngine, WatchedTrainer
from flexmarl.testing.inference import Script as EngineScript
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.testing.training import FakeTrainer
from flexmarl.training.interface import StoreRows, Trainer
from flexmarl.training.residency import ProcessGroup


class CountedTasks:
    """Task source: training task i asks `task i`, held-out task i asks `test i`; the reference is `a`."""

    def __init__(self, num_train: int | None = None) -> None:
        self.num_train = num_train

    def train(self, index: int) -> Task:
        """Returns training task number `index`. Raises SourceExhausted past the end."""
        if self.num_train is not None and index >= self.num_train:
            raise SourceExhausted(f"tasks: there is no training task at position {index} of {self.num_train}")
        return Task(input_id=f"task-{index}", prompt=f"task {index}", reference="a", data={"position": index})

    def held_out(self, n: int) -> tuple[Task, ...]:
        """Returns held-out tasks 0 to n - 1."""
        return tuple(Task(input_id=f"test-{i}", prompt=f"test {i}", reference="a") for i in range(n))


def spoken(say: Script, renderer: ChatRenderer) -> EngineScript:
    """Makes an engine's script from an agent's: decodes prompts to text, and adds the end token to each reply."""

    def script(request: GenerationRequest) -> Sequence[int]:
        return [*renderer.encode(say(renderer.decode(request.prompt_ids), request)), *renderer.encode(END)]

    return script


@workflow("scripted")
async def answer(task: Task, team: Team) -> None:
    """The simplest workflow: every agent answers the task and is rewarded with its own answer's score."""
    for seat in team:
        reply = await seat.act(task.prompt)
        reply.reward(task.score(reply.text))
        team.report(success=task.score(reply.text))


def a_or_b(prompt: str, request: GenerationRequest) -> str:
    """Answers right (`a`) or wrong (`b`), by the request's seed."""
    return "ab"[request.seed % 2]


def watched_trainer(
    policy: PolicyName, objects: ObjectStore, kind: type[FakeTrainer] = FakeTrainer, *, sample_cost_s: float = 0.0
) -> WatchedTrainer:
    """Makes a fake trainer that records what went into each update."""
    cache = WatchedCache(policy)
    return WatchedTrainer(kind(policy, objects, sample_cost_s=sample_cost_s, cache=cache), cache)


class ScriptedResidents:
    """Residents of a scripted run: engines and trainers that exist already, in this process."""

    def __init__(
        self,
        objects: ObjectStore,
        engines: Mapping[PolicyName, Sequence[WeightedEngine]],
        trainers: Mapping[PolicyName, Trainer],
    ) -> None:
        """`engines` has the engines of each policy, in the order of their instance numbers."""
        self.objects, self._engines, self._trainers = objects, engines, trainers

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Makes a cluster in this process."""
        return inproc_cluster(events=events)

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[WeightedEngine]:
        """Specifies one of the engines."""
        return ResidentSpec(
            name=WorkerId.engine(instance),
            kind=ResidentKind.ENGINE,
            contract=WeightedEngine,
            make=lambda: self.make_engine(policy, instance),
            error=EngineError,
        )

    def make_engine(self, policy: PolicyName, instance: InstanceId) -> WeightedEngine:
        """Returns the engine of an instance."""
        return self._engines[policy][instance.number]

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Specifies the trainer of a policy."""
        return ResidentSpec(
            name=WorkerId.trainer(policy),
            kind=ResidentKind.TRAINER,
            contract=Trainer,
            make=lambda: self._trainers[policy],
            error=TrainingError,
        )

    def replacement_s(self, policy: PolicyName) -> float | None:
        """Returns None: lost engines are not replaced."""
        return None

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns no group: every trainer has its own device."""
        return {}


def _small_run(agents: Mapping[str, str], sections: Mapping[str, Any]) -> RunSettings:
    policies: Mapping[str, Any] = sections.get("policies", {})
    small = {
        "steps": 1,
        "batch": {"groups": 2, "episodes": 2},
        "credit": {"filter": None},
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 0},
        "tasks": {"type": "generator", "name": "counted"},
        "team": {
            "agents": {agent: {"policy": policy} for agent, policy in agents.items()},
            "workflow": {"type": "custom", "name": "scripted"},
        },
    }
    named = {name: {"model": "scripted", **policies.get(name, {})} for name in agents.values()}
    return RunSettings.model_validate(small | dict(sections) | {"policies": named})


class ScriptedRun:
    """One run in virtual time. Its parts may be replaced before it is played, and inspected afterwards."""

    def __init__(
        self,
        workflow: Workflow = answer,
        say: Script = a_or_b,
        *,
        agents: Mapping[str, str] = {"solver": "solver"},
        num_tasks: int | None = None,
        seconds_per_token: float = 0.1,
        seconds_per_sample: float = 0.0,
        fails: Callable[[GenerationRequest], str] = lambda request: "",
        folder: Path | None = None,
        store: SqliteStore | None = None,
        **sections: Any,
    ) -> None:
        """`agents` gives the policy of each agent. `fails` gives the reason why a call fails, or "".

        `sections` are those of a config (`steps=2, mode="sync", rollout={...}`). The default is a small run without
        filter, evaluation and checkpoints. Checkpoints need a `folder`. If there are some in it, the run resumes from
        the newest. With the `store` of a run that was ended, it resumes even before the first checkpoint.
        """
        self.settings = _small_run(agents, sections)
        renderer = character_renderer()
        trained = [PolicyName(name) for name in sorted(self.settings.trained)]
        team = TeamSpec.build(self.settings.team, {PolicyName(name): renderer for name in agents.values()}, trained)
        self.blueprint = Blueprint(
            settings=self.settings, source=CountedTasks(num_tasks), team=replace(team, run=workflow)
        )
        self.stop = StopRequest()
        """Ends the run at a step boundary, once it is made."""
        self.objects = objects = InlineObjectStore()
        self.store: ExperienceStore = store or SqliteStore(agents=list(team.agents), columns=TURN_COLUMNS)
        self.engines: dict[PolicyName, list[Any]] = {
            PolicyName(name): [
                WatchedEngine(
                    ScriptedEngine(
                        spoken(say, renderer),
                        latency_s=seconds_per_token,
                        decode=renderer.decode,
                        objects=objects,
                        fails=fails,
                    )
                )
                for _ in range(policy.instances)
            ]
            for name, policy in self.settings.policies.items()
        }
        self.trainers: dict[PolicyName, Any] = {
            name: watched_trainer(name, objects, sample_cost_s=seconds_per_sample) for name in trained
        }
        self.world: World
        """The world of the run; `play` makes it."""
        self.events = RememberedEvents(None)
        """The events of the run so far."""
        self.progress: Progress = NullProgress()
        self.rules = PRODUCTION
        self.metrics: dict[int, Mapping[str, float]] = {}
        """Metrics by the number of steps done."""
        self.outcome: RunOutcome | None = None
        self.failure: BaseException | None = None
        """The exception that ended the run early."""
        self.lines: list[str] = []
        """Lines that a resumption prints for the user."""
        self._folder = folder
        self._resumes = folder is not None and (store is not None or any(folder.glob("step-*")))
        if folder is None and self.settings.checkpoint.every:
            raise ValueError(f"checkpoint.every is {self.settings.checkpoint.every}: give a `folder` for checkpoints")

    def play(self, *loops: Callable[["ScriptedRun"], Coroutine[Any, Any, None]]) -> Self:
        """Plays the run to its end, together with the coroutines of `loops`, such as faults. Raises its failure."""
        try:
            run_virtual(self._play(loops))
        except BaseException as failure:
            self.failure = failure
            raise
        return self

    def rows(self) -> list[Row]:
        """Returns every row of every agent, in the order of sample ids."""
        return run_virtual(self._rows())

    def residents(self) -> Residents:
        """Makes the residents of the run's world. Subclasses whose engines can be lost and replaced override it."""
        return ScriptedResidents(self.objects, self.engines, self.trainers)

    def players(self) -> Sequence[ResidentSpec[RolloutWorker]]:
        """Specifies the rollout workers; none: the controller plays. Subclasses that have some override it."""
        return ()

    def open_doors(self) -> Doors | None:
        """Opens the doors of the run's world; None: no program plays. Subclasses with a gateway override it."""
        return None

    def make_pool(self, *instances: Any, **how: Any) -> InferencePool:
        """Makes the pool of the run's world. Subclasses with another pool override it."""
        return InferencePool(*instances, **how)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of a step."""
        self.metrics[step] = {**self.metrics.get(step, {}), **values}

    def close(self, *, failed: bool = False) -> None:
        """Does nothing: there is nothing to write out."""

    async def _rows(self) -> list[Row]:
        found = await self.store.query("SELECT sample_id FROM samples ORDER BY sample_id")
        return await self.store.get([sample_id for (sample_id,) in found.rows])

    async def _play(self, loops: Sequence[Callable[["ScriptedRun"], Coroutine[Any, Any, None]]]) -> None:
        saving = self.settings.checkpoint
        checkpoints = Checkpoints(
            self._folder or Path(), keep=saving.keep, budget_bytes=saving.budget_bytes, in_thread=False
        )
        for trainer in self.trainers.values():
            trainer.rows = StoreRows(self.store)
        async with world_of(
            self.settings, self.store, self.residents(), self.events, make_pool=self.make_pool, players=self.players()
        ) as world:
            self.world = replace(world, doors=self.open_doors())
            start = None
            if self._resumes:
                start = await resume(checkpoints, self.trainers, self.store, events=self.events, say=self.lines.append)
            orchestrator, _ = wire(
                self.blueprint,
                self.world,
                events=self.events,
                metrics=Metrics(asyncio.get_running_loop().time, [self]),
                progress=self.progress,
                checkpoints=checkpoints,
                start=start,
                request=self.stop,
                rules=self.rules,
            )
            happening = [asyncio.create_task(run(self), name=f"loop/{run.__name__}") for run in loops]
            try:
                self.outcome = await orchestrator.run()
            finally:
                for task in happening:
                    task.cancel()
                await asyncio.gather(*happening, return_exceptions=True)
