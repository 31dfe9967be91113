"""Runs one command: train, evaluate or export, from settings to the files that it leaves."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.analysis.summary import Summary, render_pictures, render_summary
from flexmarl.analysis.tables import summary_table
from flexmarl.assemble.blueprint import Blueprint, draw_up, refuse_simulated, trained_on
from flexmarl.assemble.boxes import check_sandbox_of
from flexmarl.assemble.ending import Supervisor, recorded_failure, run_until_lost
from flexmarl.assemble.export import with_starts
from flexmarl.assemble.kept import KeptEvaluations, OneEvaluation, write_settings
from flexmarl.assemble.residents import settle_memory
from flexmarl.assemble.wire import emit_start, wire
from flexmarl.assemble.world import World, initial_versions, make_evaluator, open_world, watch_workers
from flexmarl.cluster.hard_stop import HardStop, run_and_leave_threads
from flexmarl.cluster.own_folder import check_not_planted, check_ours
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import (
    CheckpointError,
    ConfigError,
    CreditError,
    EpisodeError,
    FlexmarlError,
    StoreInUse,
    boundary,
    cause_of,
)
from flexmarl.events.backends.trackers import trackers
from flexmarl.events.event import Event, Events
from flexmarl.events.failures import Failures, KeptFailure
from flexmarl.events.journal import Journal, check_format
from flexmarl.events.metrics import JsonlSink, Metrics
from flexmarl.events.notices import Starting
from flexmarl.events.progress import Progress, progress_on
from flexmarl.events.run_events import RunFailed, StopRequested
from flexmarl.events.run_folder import RunFolder, make_run_folder
from flexmarl.events.safe_json import is_secret_key, parse_json, plain
from flexmarl.experience.backends.sqlite import DurableStore, SqliteStore
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.store_file import restore_file
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.orchestrator.checkpoint import CheckpointFolder, RunState, Which
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.publish import Publisher, Versions
from flexmarl.orchestrator.run import LEFT_BEHIND_S, RunOutcome
from flexmarl.orchestrator.saving import Checkpoints, resume
from flexmarl.orchestrator.stopping import none_better

LOOSE_KEYS = frozenset(
    {
        *("name", "out", "steps", "evaluate", "checkpoint", "alarms", "stop", "metrics"),
        *("simulation", "cluster", "process_groups", "pool", "balance", "objects"),
    }
)
"""Settings that may differ between a run and its resumption: none of them changes what a step computes. A run may go on
on another cluster, whose arithmetic may differ in the last bits."""


class TrainCommand:
    """One command that trains, and the folder of its run."""

    def __init__(self, blueprint: Blueprint, folder: RunFolder, *, resumed: bool) -> None:
        self._blueprint = blueprint
        self._settings = blueprint.settings
        self._folder = folder
        self._resumed = resumed

    @property
    def folder(self) -> Path:
        """The folder of everything that the run leaves."""
        return self._folder.path

    def train(
        self, console: Console, log: Callable[[Event], None] | None = None, *, supervisor: Supervisor | None = None
    ) -> Summary:
        """Trains to the last step; returns the summary, which is also printed and in the folder.

        `log` hears every event, as the journal does. The `supervisor` hears its events, and can stop it. In the main
        thread, Ctrl-C and SIGTERM stop it, too. Raises the error that ended the run, with a note that names the last
        checkpoint, and KeyboardInterrupt if the run was stopped. The pictures are drawn then too.
        """
        if self._resumed and (done := finished(self._folder)) and done.steps >= self._settings.steps:
            console.print(f"nothing to do: {done.steps} steps are done, and steps={self._settings.steps}")
            console.print(summary_table(done))
            return done
        started = datetime.now()
        try:
            with HardStop() as hard:
                run_and_leave_threads(self._train(console, hard, log, supervisor or Supervisor()))
        except StoreInUse:  # Another process runs in the folder: nothing there is touched.
            raise
        except BaseException as error:
            with suppress(OSError, FlexmarlError):  # The error that ended the run must be raised.
                render_pictures(self.folder)
                error.add_note(f"{self.folder}: {resume_hint(self.folder, error)}")
            raise
        summary = render_summary(self.folder, wall_s=(datetime.now() - started).total_seconds())
        console.print(summary_table(summary))
        return summary

    async def _train(
        self, console: Console, hard: HardStop, log: Callable[[Event], None] | None, supervisor: Supervisor
    ) -> None:
        settings, folder = self._settings, self._folder
        path = folder.store if settings.store.type == "sqlite" else None
        async with AsyncExitStack() as stack:
            stack.enter_context(supervisor.stoppable())
            gone = self._gone(path, console.print)
            store = open_store(self._blueprint, path)  # First: of a folder in which a run is live, nothing is touched.
            stack.push_async_callback(store.close)
            clock = run_clock()
            journal, events = Journal(folder.journal), Events(clock)
            stack.callback(journal.close)
            events.listen(Event, journal.write)
            events.listen(Event, log or (lambda event: None))
            Failures(folder.failures, events)
            failed = supervisor.listen(events)
            hard.report = lambda because: events.emit(RunFailed(because=because))
            stack.enter_context(recorded_failure(events))
            warn = Console(stderr=True, markup=False, highlight=False).print
            tracked = trackers(settings.metrics, folder, plain(settings), say=console.print, warn=warn)
            metrics = Metrics(clock, [JsonlSink(folder.metrics), *tracked])
            stack.push(lambda kind, *_: metrics.close(failed=kind is not None))
            with console.status("starting") as status:
                events.listen(Starting, lambda starting: status.update(starting.waits_for))
                world = await stack.enter_async_context(open_world(self._blueprint, store, path, events))
            stack.enter_context(supervisor.on_signals(hard))
            emit_start(self._blueprint, world, events)
            lost = watch_workers(world, events)
            checkpoints = self._checkpoints(path)
            start = await self._resume(checkpoints, world, store, events, console.print, gone=gone)
            settle_memory()
            progress = progress_on(console, clock)
            orchestrator, monitor = wire(
                self._blueprint,
                world,
                events=events,
                metrics=metrics,
                progress=progress,
                checkpoints=checkpoints,
                start=start,
                keep=KeptEvaluations(self._blueprint, folder, clock),
                request=supervisor.request,
            )
            with supervisor.after_the_step(*self._asked_to_stop(progress, events)):
                outcome = await run_until_lost(
                    orchestrator.run(), watch=monitor.watch(), lost=[lost, failed], events=events
                )
            self._say_end(outcome, console.print)

    def _say_end(self, outcome: RunOutcome, say: Callable[[str], None]) -> None:
        """Raises KeyboardInterrupt if the run was stopped; says so if its best checkpoint is no improvement."""
        if outcome.stopped:
            raise KeyboardInterrupt(f"stopped after step {outcome.steps}: {outcome.stopped}")
        best = self._settings.checkpoint.best
        if best and (said := none_better(outcome.evaluations, best)):
            say(f"checkpoint.best: {said}")

    def _checkpoints(self, store: Path | None) -> Checkpoints:
        saving, folder = self._settings.checkpoint, self._folder.checkpoints
        copied = store if saving.store else None
        return Checkpoints(folder, keep=saving.keep, budget_bytes=saving.budget_bytes, store=copied)

    def _gone(self, store: Path | None, say: Callable[[str], None]) -> list[Path]:
        """Files of an earlier run that are gone. A store is first restored, if the newest checkpoint has a copy."""
        if self._resumed and store is not None and not store.exists():
            checkpoint = CheckpointFolder(self._folder.checkpoints).verified().path
            if checkpoint is not None and (copy := checkpoint / store.name).exists():
                restore_file(store, copy)
                say(f"{store} was gone: the run goes on with its copy in {checkpoint.name}")
        return [one for one in (store, self._folder.metrics) if one and not one.exists()]

    async def _resume(
        self,
        checkpoints: Checkpoints,
        world: World,
        store: ExperienceStore,
        events: Events,
        say: Callable[[str], None],
        *,
        gone: Sequence[Path],
    ) -> RunState | None:
        """Goes back to the newest checkpoint; None if the run is new. `gone`: files that were not there."""
        if not self._resumed:
            return None
        state = await resume(checkpoints, world.trainers, store, events=events, say=say)
        lost = {self._folder.store: "turns", self._folder.metrics: "figures"}
        for path in gone if state.step else ():
            only = " to `flexmarl show`" if path == self._folder.store else "; the summary has those of evaluations"
            say(f"{path} was gone: the {lost[path]} before step {state.step + 1} are lost{only}")
        return state

    def _asked_to_stop(self, progress: Progress, events: Events) -> tuple[float, Callable[[str], None]]:
        """Returns the seconds that a step has after the first Ctrl-C, and a function that says so."""
        checkpoint = self._settings.checkpoint
        within_s = checkpoint.on_interrupt_s if checkpoint.every else 0.0

        def say(because: str) -> None:
            progress.note(
                f"{because}: the run ends after the step under way, within {within_s:g} s "
                f"(checkpoint.on_interrupt_s); the second one ends it at once"
            )
            events.emit(StopRequested(because=because, within_s=within_s))

        return within_s, say


def resume_hint(path: Path, error: BaseException | None = None) -> str:
    """Returns a sentence with the last checkpoint of a run that ended early, and the command that continues it.

    `error` ended the run, if one did. After a mistake in settings or rewards, or if every episode failed, the command
    would only repeat the error.
    """
    folder = RunFolder(path)
    again = f"flexmarl train {folder.config} --resume {path}"
    saved = newest_checkpoint(folder)
    repeats = error is not None and isinstance(cause_of(error), ConfigError | CreditError | EpisodeError)
    if saved is None and repeats:
        return "There is no checkpoint yet; change what the error names, then start a new run"
    if saved is None:
        return f"There is no checkpoint yet (see checkpoint.every); start again with: {again}"
    first = "change what the error names before you continue with" if repeats else "continue with"
    return f"Last good checkpoint: {saved}; {first}: {again}"


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """Returns the newest checkpoint of a run that has all its files in their recorded sizes, or None."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    intact = [one.step for one in checkpoints.held() if not one.damage]
    return folder.checkpoints / checkpoints.of_step(intact[-1]).name if intact else None


def finished(folder: RunFolder) -> Summary | None:
    """Returns the summary of a run that ended, or None: a run that failed or was killed wrote none."""
    if not folder.summary.is_file():
        return None
    with boundary(CheckpointError, f"{folder.summary} is damaged; remove it to go on from the newest checkpoint"):
        return Summary(**parse_json(folder.summary.read_bytes()))


def run_clock() -> Callable[[], float]:
    """Returns a clock that counts seconds from now, by the running event loop."""
    time = asyncio.get_running_loop().time
    started = time()
    return lambda: time() - started


def assemble_run(settings: RunSettings, *, resume_from: Path | None = None) -> TrainCommand:
    """Assembles a new run in a folder of its own, or resumes the run in the folder `resume_from`."""
    refuse_simulated(settings)
    if not settings.trained:
        raise ConfigError(
            f"policies: none of {', '.join(settings.policies)} is trainable, so there is nothing to train; "
            f"set trainable: true on one, or use `flexmarl eval`"
        )
    if resume_from is not None:
        check_same_run(settings, RunFolder(resume_from))
    check_sandbox_of(settings)
    blueprint = draw_up(settings)
    if resume_from is None:
        folder = new_run_folder(settings)
        settings = with_starts(settings, folder.path / "start")
        blueprint = replace(blueprint, settings=settings)
        write_settings(settings, folder)
    else:
        folder = RunFolder(resume_from)
    return TrainCommand(blueprint, folder, resumed=resume_from is not None)


def new_run_folder(settings: RunSettings, name: str = "") -> RunFolder:
    """Makes a new run folder in `out`, with the run's name or another one.

    Raises ConfigError if it cannot, or if another user planted `out`.
    """
    try:
        check_not_planted(settings.out, "out")
        settings.out.mkdir(parents=True, exist_ok=True)
        check_not_planted(settings.out, "out")  # Again: what was not there may have been planted meanwhile.
        return make_run_folder(settings.out, name or settings.name, datetime.now())
    except OSError as error:
        raise ConfigError(
            f"out: no run folder can be made in '{settings.out}': {error.strerror}; use a folder that you may "
            f"write to, e.g. out=runs"
        ) from error


def check_same_run(settings: RunSettings, folder: RunFolder) -> None:
    """Raises ConfigError naming the settings in which a run and its resumption differ and must not.

    Also if there is no run, or if it is another user's; FlexmarlError if its journal is of another format.
    """
    if not folder.config.is_file():
        raise ConfigError(f"{folder.path} is no run folder: it has no config.yaml; give the path `train` printed")
    check_ours(folder.path, "--resume")
    check_format(folder.journal)
    # Loaded, not read: a setting that came after the run was begun is what it was then, its default.
    then, now = load_run(folder.config).model_dump(mode="json"), settings.model_dump(mode="json")
    for each in (then, now):
        each["rollout"].pop("workers")  # Who plays changes nothing that is played.
        for policy in each["policies"].values():
            policy["training"].pop("ranks")  # Checkpoints are those of any number.
    differing = {key for key in {*then, *now} - LOOSE_KEYS if then.get(key) != now.get(key)}
    if differing:
        differences = "; ".join(changes({k: then.get(k) for k in differing}, {k: now.get(k) for k in differing}))
        raise ConfigError(f"{folder.path} was run with other settings: {differences}; resume with {folder.config}")
    done = max((one.step for one in CheckpointFolder(folder.checkpoints).held()), default=0)
    if done > settings.steps and finished(folder) is None:
        raise ConfigError(
            f"steps is {settings.steps}, and {folder.path} has done {done}: give at least {done}; `flexmarl eval` and "
            f"`flexmarl export` take it as it is"
        )


def changes(then: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Each setting that changed, and how.

    >>> list(changes({"seed": 1, "batch": {"groups": 4}}, {"seed": 1, "batch": {"groups": 8}}))
    ['batch.groups was 4, is 8']
    """
    for key in sorted({*then, *now}):
        old, new = then.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from changes(old, new, f"{within}{key}.")
        elif old != new:
            yield f"{within}{key} differs" if is_secret_key(key) else f"{within}{key} was {old!r}, is {new!r}"


class EvaluatedOnce(NamedTuple):
    """One evaluation by a command, and what it played with."""

    evaluation: Evaluation
    checkpoint: Path | None
    """The checkpoint that was played; None: the models as they are."""
    kept: Path | None
    """The folder that keeps what was played; None if it could not be kept."""
    failures: Sequence[KeptFailure]
    """The first failure of each kind."""
    asked: int
    """Episodes that `evaluate.tasks` asks for; fewer are played if fewer tasks are held out."""
    caution: str
    """Text that names held-out tasks whose prompts are trained on; empty if there are none."""


def evaluate_once(
    settings: RunSettings,
    run: RunFolder | None = None,
    *,
    which: Which = "newest",
    supervisor: Supervisor | None = None,
) -> EvaluatedOnce:
    """Plays the held-out tasks with a checkpoint of a run, or with the models as they are if there is no `run`.

    Raises ConfigError if there are no held-out tasks, CheckpointError if there is no such checkpoint, or none intact.
    """
    refuse_simulated(settings)
    if not settings.evaluate.tasks:
        raise ConfigError("evaluate.tasks is 0, so there is nothing to play; set it, e.g. evaluate.tasks=64")
    check_sandbox_of(settings)
    reading = CheckpointFolder(run.checkpoints).reading(which) if run else nullcontext()
    with TemporaryDirectory(prefix="flexmarl-") as starts, reading as checkpoint:
        kept = folder_of_eval(settings, run)
        if kept is not None:
            write_settings(settings, RunFolder(kept))  # As given: the folder of the starts is a temporary one.
        blueprint = draw_up(with_starts(settings, Path(starts)), disjoint=False)
        failures = Failures(RunFolder(kept).failures if kept else None)
        evaluating = _evaluate_once(blueprint, checkpoint, kept, failures, supervisor or Supervisor())
        evaluation = run_and_leave_threads(evaluating)
    played = run.checkpoints / checkpoint.name if run and checkpoint else None
    asked = settings.evaluate.tasks * settings.evaluate.episodes
    return EvaluatedOnce(evaluation, played, kept, failures.kept, asked, trained_on(blueprint))


def folder_of_eval(settings: RunSettings, run: RunFolder | None) -> Path | None:
    """Makes the folder that keeps what `flexmarl eval` plays: in the run's, or a new one in `out`.

    None if the settings keep nothing, or if the run's folder cannot be written. Raises ConfigError if `out` cannot.
    """
    if not settings.evaluate.keep or settings.store.type != "sqlite":
        return None
    if run is None:
        return new_run_folder(settings, f"eval-{settings.name}").path
    if not os.access(run.path, os.W_OK):
        return None
    return make_run_folder(run.evaluations, "eval", datetime.now()).path


async def _evaluate_once(
    blueprint: Blueprint, checkpoint: Path | None, kept: Path | None, failures: Failures, supervisor: Supervisor
) -> Evaluation:
    settings = blueprint.settings
    with supervisor.stoppable():
        async with scratch_world(blueprint) as world:
            failures.listen(world.pool.events)
            start = None
            if checkpoint is not None:
                start = await Checkpoints(checkpoint.parent, keep=1).restore(checkpoint, world.trainers)
            versions, events = Versions(initial_versions(settings, start)), world.pool.events
            publisher = Publisher(
                trainers=world.trainers, pool=world.pool, objects=world.objects, versions=versions, events=events
            )
            for policy in world.trainers:
                await publisher.publish(policy, versions.served[policy])
            keep = OneEvaluation(kept, blueprint, run_clock()) if kept else None
            try:
                step = start.step if start else 0
                return await make_evaluator(blueprint, world, versions, keep).run(when="after", step=step)
            finally:
                await end_leftover_tasks(LEFT_BEHIND_S)


@asynccontextmanager
async def scratch_world(blueprint: Blueprint) -> AsyncIterator[World]:
    """Opens a world whose store is discarded afterwards."""
    with TemporaryDirectory(prefix="flexmarl-") as folder:
        path = Path(folder) / "experience.sqlite"
        async with open_world(blueprint, open_store(blueprint, path), path, Events()) as world:
            yield world


def open_store(blueprint: Blueprint, path: Path | None) -> ExperienceStore:
    """Opens the store of a run: the file at `path`, which a resumed run already has, or memory without a path."""
    agents = list(blueprint.team.agents)
    if path is None:
        return SqliteStore(agents=agents, columns=TURN_COLUMNS)
    return DurableStore.open(path) if path.exists() else DurableStore.create(path, agents=agents, columns=TURN_COLUMNS)
