"""Wires a run: the only place that names backends. In: settings. Out: a run that trains, evaluates or exports.

settings ──► folder, code, tasks, renderers, team        (no weights yet: what `check` also makes)
         ──► thread, objects, store, pool, trainers      (World: exists while a command runs)
         ──► feed, rollout, collector, sessions, ...     (Parts of the orchestrator)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from flexmarl.agents import ChatRenderer, TeamSpec, load_code
from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.cluster.settings import InlineCluster
from flexmarl.config import RunSettings
from flexmarl.config.load import read_yaml
from flexmarl.errors import CheckpointError, ConfigError, EngineError, boundary
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.rows import TURN_COLUMNS
from flexmarl.inference.engines import EngineParts, make_engine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.observability.backends.tensorboard import TensorBoardSink
from flexmarl.observability.journal import Journal
from flexmarl.observability.metrics import Metrics
from flexmarl.observability.progress import Progress, progress_on
from flexmarl.observability.report import Summary, render_summary, summary_table
from flexmarl.observability.run_folder import RunFolder, make_run_folder
from flexmarl.observability.sinks import JsonlSink
from flexmarl.orchestrator.checkpoint import Checkpoints, RunState
from flexmarl.orchestrator.collect import Collector, Release
from flexmarl.orchestrator.evaluate import Evaluation, Evaluator
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.publish import Publisher
from flexmarl.orchestrator.run import Orchestrator, Parts
from flexmarl.orchestrator.settings import Mode
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import PolicyName, Version
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.player import Player
from flexmarl.rollout.rollout import Rollout
from flexmarl.tasks import TaskSource, check_disjoint
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import Trainer
from flexmarl.training.session import TrainingSession

LOOSE_KEYS = frozenset({"name", "out", "steps", "evaluate", "checkpoint"})
"""Settings that may differ between a run and its resumption: none of them changes what a step computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """All of a run that needs no weights."""

    settings: RunSettings
    cluster: InlineCluster
    source: TaskSource
    team: TeamSpec


def draw_up(settings: RunSettings) -> Blueprint:
    """Opens the tasks and seats the team. Raises ConfigError naming the key."""
    cluster = inline_cluster(settings)
    return Blueprint(settings=settings, cluster=cluster, source=open_tasks(settings), team=seat_team(settings))


def inline_cluster(settings: RunSettings) -> InlineCluster:
    """The one world there is. Raises ConfigError for another, or if its device is not there."""
    cluster = settings.cluster
    if not isinstance(cluster, InlineCluster):
        raise ConfigError(
            f"cluster.type={cluster.type} cannot run yet: this version trains in one process; use cluster.type=inline"
        )
    if cluster.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"cluster.device={cluster.device}, but torch sees no CUDA device; use cluster.device=cpu")
    return cluster


def open_tasks(settings: RunSettings) -> TaskSource:
    """Loads the user's code and opens the tasks; training and held-out ones must be disjoint."""
    for path in settings.code:
        load_code(settings.path(path))
    source = settings.tasks.open(seed=settings.seed, base=settings.base)
    num_train = settings.batch.groups * settings.steps
    if source.num_train is not None and source.num_train < num_train:
        raise ConfigError(
            f"tasks: steps={settings.steps} of batch.groups={settings.batch.groups} need {num_train} tasks, there are "
            f"{source.num_train}; use steps={source.num_train // settings.batch.groups}, or raise tasks.epochs"
        )
    if settings.evaluate.tasks and not source.held_out(1):
        raise ConfigError(
            f"evaluate.tasks is {settings.evaluate.tasks}, but the tasks hold none out; use evaluate.tasks=0, or "
            f"tasks.held_out_share=0.1"
        )
    check_disjoint(source, num_train=num_train, num_held_out=settings.evaluate.tasks)
    return source


def seat_team(settings: RunSettings) -> TeamSpec:
    """The team, with a chat renderer for each policy's own tokenizer."""
    renderers = {PolicyName(name): ChatRenderer(load_tokenizer(settings, name)) for name in settings.policies}
    return TeamSpec.build(settings.team, renderers, trained=[PolicyName(name) for name in settings.trained])


def load_tokenizer(settings: RunSettings, policy: str) -> PreTrainedTokenizerBase:
    """A policy's tokenizer, from its model's folder or name."""
    source = model_source(settings, policy)
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # Whatever a file of the user's or the hub leads to; often many lines.
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"policies.{policy}.model: no tokenizer from '{source}': {why[0]}") from error


def model_source(settings: RunSettings, policy: str) -> str:
    """Where a policy's model is: a folder, or a name on the Hugging Face hub. Raises ConfigError."""
    model = settings.policies[policy].model
    folder = settings.path(model)
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/")):
        raise ConfigError(
            f"policies.{policy}.model: '{model}' is no Hugging Face model folder ({folder / 'config.json'} does not "
            f"exist); give a folder with config.json and weights, or a hub name such as Qwen/Qwen3-0.6B"
        )
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The live parts that hold weights, devices or experience."""

    objects: ObjectStore
    store: ExperienceStore
    pool: InferencePool
    trainers: Mapping[PolicyName, Trainer]


@asynccontextmanager
async def open_world(blueprint: Blueprint) -> AsyncIterator[World]:
    """Makes engines and trainers in this process; leaving the block ends them."""
    settings, cluster = blueprint.settings, blueprint.cluster
    if cluster.threads is not None:
        torch.set_num_threads(cluster.threads)
    torch.manual_seed(settings.seed)
    transformers_logging.disable_progress_bar()
    async with AsyncExitStack() as stack:
        thread = DeviceThread()
        stack.callback(thread.close)
        objects = InlineObjectStore()
        decoders = {agent.policy: agent.renderer.decode for agent in blueprint.team.agents.values()}
        engines: dict[PolicyName, list[Any]] = {}
        for name, policy in settings.policies.items():
            parts = EngineParts(
                policy=PolicyName(name),
                make_model=partial(load_model, model_source(settings, name)),
                decode=decoders[PolicyName(name)],
                store=objects,
                thread=thread,
                device=cluster.device,
                deterministic=settings.deterministic,
            )
            for _ in range(policy.instances):
                with boundary(EngineError, f"policies.{name}.engine: making an engine on {cluster.device}"):
                    engine = make_engine(policy.engine, parts)
                stack.push_async_callback(engine.close)
                engines.setdefault(PolicyName(name), []).append(engine)
        trainers = {
            PolicyName(name): SingleProcessTrainer(
                PolicyName(name),
                load_model(model_source(settings, name)),
                settings.policies[name].training,
                objects,
                thread=thread,
                tokenizer=load_tokenizer(settings, name),
                device=cluster.device,
            )
            for name in sorted(settings.trained)
        }
        store = SqliteStore(agents=list(blueprint.team.agents), columns=TURN_COLUMNS)
        stack.push_async_callback(store.close)
        pool = await stack.enter_async_context(InferencePool(engines, settings.pool))
        yield World(objects=objects, store=store, pool=pool, trainers=trainers)


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
        async with open_world(self._blueprint) as world, AsyncExitStack() as stack:
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


def wire(
    blueprint: Blueprint,
    world: World,
    *,
    journal: Journal,
    metrics: Metrics,
    progress: Progress,
    checkpoints: Checkpoints,
    start: RunState | None = None,
) -> tuple[Orchestrator, Monitor]:
    """Joins a world's parts to the orchestrator of one run; the same for every world. Called inside the event loop."""
    settings, team = blueprint.settings, blueprint.team
    world.pool.on_lost = lambda instance, because: journal.event("instance_lost", instance=instance, because=because)
    journal.event(
        "run_started",
        because=team.level.because,
        level=team.level.name,
        seed=settings.seed,
        mode=settings.mode,
        release=release_of(settings),
        chat={agent.policy: agent.renderer.extension.summary for agent in team.agents.values()},
    )
    if start:
        journal.event("resumed", step=start.step, versions=start.versions, next_group=start.next_group)
    store = world.store
    versions = Versions(initial_versions(settings, start))
    admission = Admission(slots=settings.batch.groups, next_group=start.next_group if start else 0)
    monitor = Monitor(
        name=settings.name,
        steps=settings.steps,
        metrics=metrics,
        progress=progress,
        pool=world.pool,
        versions=versions,
    )
    sessions = {
        policy: TrainingSession(
            policy,
            store,
            trainer,
            micro_batch=settings.policies[policy].training.micro_batch,
            version=versions.served[policy],
            on_report=monitor.accumulated,
        )
        for policy, trainer in world.trainers.items()
    }
    rollout = settings.rollout
    player = partial(
        Player,
        team=team,
        generate=partial(world.pool.generate, timeout_s=rollout.call_timeout_s),
        run_seed=settings.seed,
        timeout_s=rollout.episode_timeout_s,
    )
    parts = Parts(
        feed=Feed(source=blueprint.source, admission=admission, groups=settings.batch.groups, journal=journal),
        admission=admission,
        rollout=Rollout(
            player=player(store=store),
            admission=admission,
            settings=rollout,
            episodes=settings.batch.episodes,
            journal=journal,
        ),
        collector=Collector(
            store=store,
            credit=settings.credit,
            trained=[PolicyName(name) for name in settings.trained],
            admission=admission,
            versions=versions,
            release=release_of(settings),
            on_ready=lambda policy: sessions[policy].notify_ready(),
            journal=journal,
        ),
        trainers=world.trainers,
        sessions=sessions,
        publisher=Publisher(
            trainers=world.trainers, pool=world.pool, objects=world.objects, versions=versions, journal=journal
        ),
        versions=versions,
        evaluator=_evaluator(blueprint, player(temperature=settings.evaluate.temperature), versions),
        checkpoints=checkpoints,
        journal=journal,
        monitor=monitor,
    )
    orchestrator = Orchestrator(
        parts, steps=settings.steps, evaluate=settings.evaluate, checkpoint=settings.checkpoint, start=start
    )
    return orchestrator, monitor


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


def initial_versions(settings: RunSettings, start: RunState | None) -> dict[PolicyName, Version]:
    """What every policy serves at the start: 0, or what the checkpoint holds."""
    versions = start.versions if start else {}
    return {name: versions.get(name, Version(0)) for name in map(PolicyName, settings.policies)}


def release_of(settings: RunSettings) -> Release:
    """When finished groups become ready, as the mode and determinism ask."""
    if settings.mode is Mode.SYNC:
        return Release.AT_END
    return Release.IN_ORDER if settings.deterministic else Release.AT_ONCE


def _evaluator(blueprint: Blueprint, player: Player, versions: Versions) -> Evaluator:
    settings = blueprint.settings
    return Evaluator(
        player=player,
        versions=versions,
        tasks=blueprint.source.held_out(settings.evaluate.tasks),
        episodes=settings.evaluate.episodes,
        parallel=settings.rollout.inter_query * settings.rollout.intra_query,
    )


def evaluate_once(settings: RunSettings, checkpoints: Path | None) -> Evaluation:
    """Plays the held-out tasks with the newest checkpoint in a folder, or with the models as they are."""
    return asyncio.run(_evaluate_once(draw_up(settings), checkpoints))


async def _evaluate_once(blueprint: Blueprint, folder: Path | None) -> Evaluation:
    settings = blueprint.settings
    async with open_world(blueprint) as world:
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
        return await _evaluator(blueprint, player, versions).run()


def export_policies(settings: RunSettings, checkpoints: Path, out: Path) -> list[Path]:
    """Writes every trained policy of the newest checkpoint as a Hugging Face folder `out/{policy}`."""
    return asyncio.run(_export_policies(draw_up(settings), checkpoints, out))


async def _export_policies(blueprint: Blueprint, folder: Path, out: Path) -> list[Path]:
    async with open_world(blueprint) as world:
        await Checkpoints(folder, keep=1).load(world.trainers)
        for policy, trainer in world.trainers.items():
            await trainer.export(out / policy)
        return [out / policy for policy in world.trainers]
