"""One simulation: the run of a config on modelled devices, in virtual time, into a folder like that of any run."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from flexmarl.assemble.blueprint import Blueprint, draw_up
from flexmarl.assemble.run import failure_told, new_run_folder
from flexmarl.assemble.wiring import journal_start, wire
from flexmarl.assemble.world import open_world
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError
from flexmarl.experience.rows import TURN_COLUMNS
from flexmarl.observability.journal import Journal
from flexmarl.observability.metrics import Metrics
from flexmarl.observability.progress import NullProgress
from flexmarl.observability.run_folder import RunFolder
from flexmarl.observability.sinks import JsonlSink
from flexmarl.orchestrator.checkpoint import Checkpoints
from flexmarl.simulator.store import SimulatedStore
from flexmarl.simulator.tools import twinned
from flexmarl.simulator.virtual_time import run_virtual

Say = Callable[[str], None]

OBJECTS_PER_COLLECTION = 100_000
"""Made and kept since the garbage collector looked last: those of two thousand turns. Python's own number is 700."""


def _ignore(text: str) -> None:
    pass


def simulate(settings: RunSettings, *, say: Say = _ignore) -> Path:
    """Plays a run in virtual time; returns its folder, with the settings, the journal and the metrics.

    `cluster.backend` is taken to be simulated, and nothing is saved: there are no weights. `say` gets a line per step.
    Raises ConfigError for what has no model: an agent without replies, a tool without a twin.
    """
    blueprint = draw_up(as_simulated(settings))
    settings = blueprint.settings
    if not settings.trained:
        raise ConfigError("policies: none is trainable, so there is no step to simulate; set trainable: true on one")
    team = twinned(blueprint.team, settings.simulation.tools, settings.seed)
    folder = new_run_folder(settings)
    folder.config.write_text(_as_yaml(settings), encoding="utf-8")
    with _seldom_collected():
        run_virtual(_simulate(replace(blueprint, team=team), folder, say))
    return folder.path


def as_simulated(settings: RunSettings) -> RunSettings:
    """The same run on modelled devices."""
    cluster = settings.cluster.model_copy(update={"backend": "simulated"})
    checkpoint = settings.checkpoint.model_copy(update={"every": 0})
    return settings.model_copy(update={"cluster": cluster, "checkpoint": checkpoint})


def _as_yaml(settings: RunSettings) -> str:
    """In C where PyYAML was built with it: of a hundred policies, it saves seconds."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(settings.model_dump(mode="json"), Dumper=dumper, sort_keys=False)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """The garbage collector looks less often: nearly all that a simulation makes stays, and to look through it again
    and again took a quarter of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


async def _simulate(blueprint: Blueprint, folder: RunFolder, say: Say) -> None:
    clock, settings = asyncio.get_running_loop().time, blueprint.settings
    async with AsyncExitStack() as stack:
        store = SimulatedStore(agents=list(blueprint.team.agents), columns=TURN_COLUMNS)
        stack.push_async_callback(store.close)
        journal = Journal(folder.journal, clock)
        stack.callback(journal.close)
        stack.enter_context(failure_told(journal))
        metrics = Metrics(clock, [JsonlSink(folder.metrics), _Told(say, settings.steps, clock)])
        stack.callback(metrics.close)
        world = await stack.enter_async_context(open_world(blueprint, store, None))
        journal_start(blueprint, world, journal)
        orchestrator, _ = wire(
            blueprint,
            world,
            journal=journal,
            metrics=metrics,
            progress=NullProgress(),
            checkpoints=Checkpoints(folder.checkpoints, keep=1, in_thread=False),
        )
        await orchestrator.run()


class _Told:
    """Sink that says when each step ended."""

    def __init__(self, say: Say, steps: int, clock: Callable[[], float]) -> None:
        self._say, self._steps, self._clock = say, steps, clock

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Says how far the run is; of the evaluation before its first step, nothing."""
        if step:
            self._say(f"step {step} of {self._steps} ended at {self._clock():.6g} s")

    def close(self) -> None:
        """Nothing to write out."""
