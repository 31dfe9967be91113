"""Simulation of a run: plays a config on modelled devices, in virtual time, into a run folder like that of any run."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

import flexmarl.simulator.workload  # noqa: F401  # its tasks and workflow can be named in any config
from flexmarl.agents import TeamSpec
from flexmarl.analysis.costs import costs_of
from flexmarl.assemble.blueprint import Blueprint, draw_up
from flexmarl.assemble.boxes import boxed_scorer, check_sandbox_of
from flexmarl.assemble.commands import new_run_folder
from flexmarl.assemble.ending import Supervisor, recorded_failure, run_until_lost
from flexmarl.assemble.engine_room import growth_note
from flexmarl.assemble.wire import emit_start, wire
from flexmarl.assemble.world import Residents, World, watch_workers, world_of
from flexmarl.config import RunSettings
from flexmarl.errors import CheckpointError, ConfigError, StoreError, TrainingError, WorkerError
from flexmarl.events.event import Event, Events
from flexmarl.events.failures import Failures
from flexmarl.events.journal import Journal
from flexmarl.events.metrics import JsonlSink, Metrics
from flexmarl.events.progress import NullProgress
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.saving import Checkpoints, resume
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_residents import ModelledResidents, SimulatedObjectStore
from flexmarl.simulator.modelled_store import SimulatedStore
from flexmarl.simulator.replies import drawn, fitting_replies, responder_of
from flexmarl.simulator.tool_twins import TwinnedTasks, fitting_twins, twinned
from flexmarl.simulator.virtual_time import RealTime, run_virtual
from flexmarl.training.interface import StoreRows

Show = Callable[[str], None]

SIMULATED = "sim-"
"""How the names of folders of simulated runs begin, so that they can be told from those of real runs."""

MOST_LIVES = 100
"""The most lives of one run. It stops plans whose faults end every life."""

OBJECTS_PER_COLLECTION = 100_000
"""New objects until the next garbage collection: about those of two thousand turns. Python's default is 700."""


def _ignore(text: str) -> None:
    pass


class Disturbance(Protocol):
    """Interface of the faults of a simulated run. flexmarl.testing.faults.planned implements it."""

    def blueprint(self, blueprint: Blueprint) -> Blueprint:
        """Returns the run with tasks and a workflow that can fail."""
        ...

    def residents(self, residents: Residents) -> Residents:
        """Wraps engines and trainers in ones that can fail."""
        ...

    def store(self, store: ExperienceStore) -> ExperienceStore:
        """Wraps the store in one that can fail."""
        ...

    def begin(self, events: Events, die: Callable[[], None], checkpoints: Path) -> None:
        """Begins a life of the run. `die` ends it, as the loss of its controller would."""
        ...

    async def watch(self, world: World) -> None:
        """Runs the faults while the run is played."""
        ...


class Unmodelled(ConfigError):
    """A simulation lacks models. The text has a line for each key, and YAML that gives them all."""

    def __init__(self, lines: Sequence[str], fixed: Mapping[str, Any]) -> None:
        block = yaml.safe_dump(fixed, sort_keys=False, default_flow_style=None, allow_unicode=True)
        super().__init__("\n".join([*lines, "This is valid under `simulation:`, in place of these keys there:", block]))
        self.lines = lines


def check_models(settings: RunSettings, team: TeamSpec) -> None:
    """Raises Unmodelled with all replies and twins of tools that a simulation of the team lacks."""
    given = settings.simulation
    silent, replies = fitting_replies(team.agents, given.replies, recorded=given.recorded is not None)
    untimed, tools = fitting_twins(team, given.tools)
    if lines := [*silent, *untimed]:
        fixed = given.model_copy(update={"replies": replies, "tools": tools})
        keys = {key for key, faults in (("replies", silent), ("tools", untimed)) if faults}
        raise Unmodelled(lines, fixed.model_dump(mode="json", exclude_unset=True, include=keys))


def simulate(
    settings: RunSettings,
    *,
    show: Show = _ignore,
    disturbance: Disturbance | None = None,
    supervisor: Supervisor | None = None,
) -> Path:
    """Plays a run in virtual time; returns its folder, with the settings, the journal and the metrics.

    `cluster.backend` is set to `simulated`. Checkpoints are written if the config gives `checkpoint.every`. `show`
    gets a line per step. The `supervisor` hears the events, and can stop the run. If a `disturbance` ends the run, it
    resumes from its newest checkpoint, or from the start.

    Raises ConfigError if no policy is trained, Unmodelled for agents without replies and tools without a twin, and
    WorkerError if a disturbance ended MOST_LIVES lives.
    """
    with _rare_garbage_collection():
        return _played(settings, show, disturbance, supervisor).path


def _played(
    settings: RunSettings, show: Show, disturbance: Disturbance | None, supervisor: Supervisor | None
) -> RunFolder:
    blueprint = draw_up(as_simulated(settings))
    settings = blueprint.settings
    if not settings.trained:
        raise ConfigError("policies: none is trainable, so there is no step to simulate; set trainable: true on one")
    check_models(settings, blueprint.team)
    check_sandbox_of(settings)
    with RealTime() as real:
        team = twinned(blueprint.team, settings.simulation.tools, settings.seed, real)
        team = drawn(team, settings.simulation.rewards, settings.seed)
        if (seconds := settings.simulation.score_s) is not None and boxed_scorer(settings):  # Boxes that were tried.
            blueprint = replace(blueprint, source=TwinnedTasks(blueprint.source, seconds, real))
        folder = new_run_folder(settings, SIMULATED + settings.name)
        folder.config.write_text(_as_yaml(settings), encoding="utf-8")
        run_virtual(_simulate(replace(blueprint, team=team), folder, show, disturbance, supervisor))
    return folder


def as_simulated(settings: RunSettings) -> RunSettings:
    """Returns the settings of the same run on modelled devices."""
    cluster = settings.cluster.model_copy(update={"backend": "simulated"})
    saves = "every" in settings.checkpoint.model_fields_set
    checkpoint = settings.checkpoint if saves else settings.checkpoint.model_copy(update={"every": 0})
    return settings.model_copy(update={"cluster": cluster, "checkpoint": checkpoint})


def _as_yaml(settings: RunSettings) -> str:
    """Returns the settings as YAML. Uses PyYAML's C code if there is any: for a hundred policies it saves seconds."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(settings.model_dump(mode="json"), Dumper=dumper, sort_keys=False)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Makes garbage collections rarer in the block. Nearly all objects of a simulation stay alive, and searching them
    repeatedly took a quarter of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


async def _simulate(
    blueprint: Blueprint, folder: RunFolder, show: Show, disturbance: Disturbance | None, supervisor: Supervisor | None
) -> None:
    clock, settings = asyncio.get_running_loop().time, blueprint.settings
    async with AsyncExitStack() as stack:
        store = SimulatedStore(agents=list(blueprint.team.agents), columns=TURN_COLUMNS)
        stack.push_async_callback(store.close)
        journal = Journal(folder.journal)
        stack.callback(journal.close)
        metrics = Metrics(clock, [JsonlSink(folder.metrics), _StepLines(show, settings.steps, clock)])
        stack.callback(metrics.close)
        checkpoints = Checkpoints(
            folder.checkpoints,
            keep=settings.checkpoint.keep,
            budget_bytes=settings.checkpoint.budget_bytes,
            in_thread=False,
        )
        failures, saved = Failures(folder.failures), folder.checkpoints
        life = _Life(blueprint, store, journal, metrics, checkpoints, saved, failures, show, supervisor)
        if disturbance is None:
            await life.play(resumed=False)
            return
        for number in range(MOST_LIVES):
            if await life.play_disturbed(disturbance, resumed=number > 0):
                return
            show(f"the run was lost at {clock():.6g} s; it goes on")
            await asyncio.sleep(settings.simulation.restart_s)
        raise WorkerError(f"the run was lost {MOST_LIVES} times; plan fewer faults that end it")


@dataclass(frozen=True, slots=True)
class _Life:
    """The lives of one simulated run. Each is a world of its own; all share one store and folder."""

    blueprint: Blueprint
    store: ExperienceStore
    journal: Journal
    metrics: Metrics
    checkpoints: Checkpoints
    saved: Path
    failures: Failures
    show: Show
    supervisor: Supervisor | None

    async def play_disturbed(self, disturbance: Disturbance, *, resumed: bool) -> bool:
        """Plays one life. Returns False if it was lost and can be resumed. Raises errors that resuming cannot fix."""
        dead, events = asyncio.Event(), self._events()
        playing = asyncio.create_task(self._play(events, resumed=resumed, disturbance=disturbance), name="life")

        def die() -> None:
            dead.set()
            playing.cancel()

        disturbance.begin(events, die, self.saved)
        try:
            await asyncio.shield(playing)
        except (TrainingError, WorkerError, StoreError, CheckpointError):
            return False
        except asyncio.CancelledError:
            if not dead.is_set():
                playing.cancel()
                raise
            return False
        return True

    async def play(self, *, resumed: bool) -> None:
        """Plays one life to its end."""
        await self._play(self._events(), resumed=resumed)

    def _events(self) -> Events:
        """Makes the events of one life, written to the common journal. Parts of other lives do not hear them."""
        events = Events()
        events.listen(Event, self.journal.write)
        self.failures.listen(events)
        return events

    @contextmanager
    def _supervised(self, events: Events) -> "Iterator[list[asyncio.Future[None]]]":
        """Lets the supervisor hear the events, and stop the block. Yields the future that fails if it fails, if any."""
        if self.supervisor is None:
            yield []
        else:
            failed = self.supervisor.listen(events)
            with self.supervisor.stoppable(at_events_of=events):
                yield [failed]

    async def _play(self, events: Events, *, resumed: bool, disturbance: Disturbance | None = None) -> None:
        settings, blueprint, store = self.blueprint.settings, self.blueprint, self.store
        residents: Residents = modelled(settings, blueprint.team, store)
        if disturbance is not None:
            blueprint, store = disturbance.blueprint(blueprint), disturbance.store(store)
            residents = disturbance.residents(modelled(settings, blueprint.team, store))
        with recorded_failure(events), self._supervised(events) as failed:
            async with world_of(settings, store, residents, events) as world:
                emit_start(blueprint, world, events)
                if note := growth_note(settings, world.pool):
                    self.show(note)
                lost = watch_workers(world, events)
                start = None
                if resumed:
                    start = await resume(self.checkpoints, world.trainers, store, events=events, say=self.show)
                orchestrator, _ = wire(
                    blueprint,
                    world,
                    events=events,
                    metrics=self.metrics,
                    progress=NullProgress(),
                    checkpoints=self.checkpoints,
                    start=start,
                )
                if disturbance is None and not failed:
                    await orchestrator.run()
                else:
                    watch = asyncio.sleep(0) if disturbance is None else disturbance.watch(world)
                    await run_until_lost(orchestrator.run(), watch=watch, lost=[lost, *failed], events=events)


def modelled(settings: RunSettings, team: TeamSpec, store: ExperienceStore) -> ModelledResidents:
    """The modelled devices of a simulated run."""
    simulation = settings.simulation
    costs = partial(costs_of, simulation.costs)
    return ModelledResidents(
        costs=costs,
        objects=SimulatedObjectStore(
            InlineObjectStore(),
            latency_s=simulation.transfers.latency_s,
            bytes_per_s=simulation.transfers.bytes_per_s,
            bytes_of=lambda key: int(costs(key.split("/")[1]).weights_gib * 2**30),
        ),
        nodes=simulation.nodes,
        rows=StoreRows(store),
        host=CpuShare(simulation.shared_host),
        respond=responder_of(
            team, simulation.replies, recorded=simulation.recorded and settings.path(simulation.recorded)
        ),
        spare=settings.pool.replacements * len(settings.policies) + simulation.room,
    )


class _StepLines:
    """Sink of metrics that prints the time at which each step ended."""

    def __init__(self, show: Show, steps: int, clock: Callable[[], float]) -> None:
        self._show, self._steps, self._clock = show, steps, clock

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the end of a step. Prints nothing for step 0, the evaluation before the first step."""
        if step:
            self._show(f"step {step} of {self._steps} ended at {self._clock():.6g} s")

    def close(self, *, failed: bool = False) -> None:
        """Does nothing: there is nothing to write."""
