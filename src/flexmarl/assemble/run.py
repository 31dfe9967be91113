"""One command's life: train, evaluate or export, from settings to what is left on disk."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console

from flexmarl.assemble.blueprint import Blueprint, draw_up
from flexmarl.assemble.wiring import initial_versions, make_evaluator, wire
from flexmarl.assemble.world import open_world
from flexmarl.config import RunSettings
from flexmarl.config.load import read_yaml
from flexmarl.errors import CheckpointError, ConfigError, boundary
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.rows import TURN_COLUMNS
from flexmarl.observability.backends.tensorboard import TensorBoardSink
from flexmarl.observability.journal import Journal
from flexmarl.observability.metrics import Metrics
from flexmarl.observability.progress import progress_on
from flexmarl.observability.report import Summary, render_summary, summary_table
from flexmarl.observability.run_folder import RunFolder, make_run_folder
from flexmarl.observability.sinks import JsonlSink
from flexmarl.orchestrator.checkpoint import Checkpoints
from flexmarl.orchestrator.evaluate import Evaluation
from flexmarl.orchestrator.publish import Publisher
from flexmarl.orchestrator.versions import Versions
from flexmarl.rollout.player import Player

LOOSE_KEYS = frozenset({"name", "out", "steps", "evaluate", "checkpoint"})
"""Settings that may differ between a run and its resumption: none of them changes what a step computes."""


class Run:
    """One run and its folder."""

    def __init__(self, blueprint: Blueprint, folder: RunFolder, *, resumed: bool) -> None:
        self._blueprint = blueprint
        self._settings = blueprint.settings
        self._folder = folder
        self._resumed = resumed

    @property
    def folder(self) -> Path:
        """Where everything is that the run leaves behind."""
        return self._folder.path

    def train(self, console: Console) -> Summary:
        """Trains to the last step; returns the summary, which is also printed and in the folder."""
        started = datetime.now()
        asyncio.run(self._train(console))
        summary = render_summary(self.folder, wall_s=(datetime.now() - started).total_seconds())
        console.print(summary_table(summary))
        return summary

    async def _train(self, console: Console) -> None:
        async with open_world(self._blueprint, memory_store(self._blueprint)) as world, AsyncExitStack() as stack:
            clock = run_clock()
            journal = Journal(self._folder.journal, clock)
            stack.callback(journal.close)
            metrics = Metrics(clock, [JsonlSink(self._folder.metrics), TensorBoardSink(self._folder.tensorboard)])
            stack.callback(metrics.close)
            checkpoints = Checkpoints(self._folder.checkpoints, keep=self._settings.checkpoint.keep)
            start = await checkpoints.load(world.trainers) if self._resumed else None
            orchestrator, monitor = wire(
                self._blueprint,
                world,
                journal=journal,
                metrics=metrics,
                progress=progress_on(console, clock),
                checkpoints=checkpoints,
                start=start,
            )
            watching = asyncio.create_task(monitor.watch(), name="monitor")
            try:
                await orchestrator.run()
            except BaseException as error:
                journal.event("run_failed", because=f"{type(error).__name__}: {error}")
                raise
            finally:
                watching.cancel()
                (ended,) = await asyncio.gather(watching, return_exceptions=True)
                if isinstance(ended, Exception):
                    journal.event("monitor_failed", because=f"{type(ended).__name__}: {ended}")


def run_clock() -> Callable[[], float]:
    """Seconds since now, by the running event loop."""
    time = asyncio.get_running_loop().time
    started = time()
    return lambda: time() - started


def assemble_run(settings: RunSettings, *, resume: Path | None = None) -> Run:
    """A new run in a folder of its own, or the one that `resume` holds, going on."""
    if not settings.trained:
        raise ConfigError(
            f"policies: none of {', '.join(settings.policies)} is trainable, so there is nothing to train; "
            f"set trainable: true on one, or use `flexmarl eval`"
        )
    blueprint = draw_up(settings)
    if resume is None:
        with boundary(ConfigError, f"out: making a run folder in '{settings.out}'"):
            folder = make_run_folder(settings.out, settings.name, datetime.now())
        folder.config.write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    else:
        folder = RunFolder(resume)
        check_same_run(settings, folder)
    return Run(blueprint, folder, resumed=resume is not None)


def check_same_run(settings: RunSettings, folder: RunFolder) -> None:
    """Raises CheckpointError naming the settings in which a run and its resumption differ and must not.

    ConfigError if there is no run.
    """
    if not folder.config.is_file():
        raise ConfigError(f"{folder.path} is no run folder: it has no config.yaml; give the path `train` printed")
    then, now = read_yaml(folder.config), settings.model_dump(mode="json")
    differing = sorted(key for key in {*then, *now} - LOOSE_KEYS if then.get(key) != now.get(key))
    if differing:
        raise CheckpointError(
            f"{folder.path} was run with other settings: {', '.join(differing)} differ; resume with {folder.config}"
        )


def evaluate_once(settings: RunSettings, checkpoints: Path | None) -> Evaluation:
    """Plays the held-out tasks with the newest checkpoint in a folder, or with the models as they are."""
    return asyncio.run(_evaluate_once(draw_up(settings), checkpoints))


async def _evaluate_once(blueprint: Blueprint, folder: Path | None) -> Evaluation:
    settings = blueprint.settings
    async with open_world(blueprint, memory_store(blueprint)) as world:
        start = await Checkpoints(folder, keep=1).load(world.trainers) if folder else None
        versions = Versions(initial_versions(settings, start))
        journal = Journal(None, run_clock())
        publisher = Publisher(
            trainers=world.trainers, pool=world.pool, objects=world.objects, versions=versions, journal=journal
        )
        for policy in world.trainers:
            await publisher.publish(policy, versions.served[policy])
        player = Player(
            team=blueprint.team,
            generate=partial(world.pool.generate, timeout_s=settings.rollout.call_timeout_s),
            run_seed=settings.seed,
            timeout_s=settings.rollout.episode_timeout_s,
            temperature=settings.evaluate.temperature,
        )
        return await make_evaluator(blueprint, player, versions).run()


def export_policies(settings: RunSettings, checkpoints: Path, out: Path) -> list[Path]:
    """Writes every trained policy of the newest checkpoint as a Hugging Face folder `out/{policy}`."""
    return asyncio.run(_export_policies(draw_up(settings), checkpoints, out))


async def _export_policies(blueprint: Blueprint, folder: Path, out: Path) -> list[Path]:
    async with open_world(blueprint, memory_store(blueprint)) as world:
        await Checkpoints(folder, keep=1).load(world.trainers)
        for policy, trainer in world.trainers.items():
            await trainer.export(out / policy)
        return [out / policy for policy in world.trainers]


def memory_store(blueprint: Blueprint) -> ExperienceStore:
    """A store that is gone with the process."""
    return SqliteStore(agents=list(blueprint.team.agents), columns=TURN_COLUMNS)
