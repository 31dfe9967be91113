"""Commands on a config or on the folder of its run: `flexmarl train`, `eval`, `serve`, `check`, `export`, `clean`."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from flexmarl.analysis.comparison import REWARD, Measured, evaluation_figures
from flexmarl.analysis.intervals import bounds
from flexmarl.analysis.troubles import all_failed
from flexmarl.api.functions import evaluate_and_keep
from flexmarl.api.handle import load_run_folder
from flexmarl.cli.options import Config, Level, Overrides, Quiet, boxes, commands, examine, exports, log_level, serving
from flexmarl.cli.terminal import ignoring_hangup, print_text, working
from flexmarl.cluster.leases import leases_root
from flexmarl.cluster.remains import abandoned, foreign_paths, held_paths, live_processes, read_leases, release
from flexmarl.config import cautions, load_run
from flexmarl.errors import ConfigError, FlexmarlError, StoreInUse
from flexmarl.events.log import EventLog, LogLevel
from flexmarl.events.progress import SafeConsole
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text
from flexmarl.sandbox.leased_sandboxes import left_sandboxes
from flexmarl.tasks import JsonlTasks

if TYPE_CHECKING:
    from flexmarl.orchestrator.checkpoint import Which
    from flexmarl.orchestrator.evaluation import Evaluation

Step = Annotated[int | None, typer.Option(help="The checkpoint of this step, not the newest.", show_default=False)]
Best = Annotated[bool, typer.Option("--best", help="The checkpoint of the best evaluation.")]

ALL_FAILED = 3
"""Exit code of a command that ended, though every episode of the run or of its last evaluation failed."""


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Continue from the newest checkpoint of this run folder; give its config.yaml as CONFIG.",
            show_default=False,
        ),
    ] = None,
    level: Level = LogLevel.INFO,
    quiet: Quiet = False,
) -> None:
    """Train the team that CONFIG describes. The last line printed is the run folder.

    A run outlives its terminal, as with nohup. Ctrl-C or SIGTERM end it after the step under way, if that takes at most
    checkpoint.on_interrupt_s, and save it; a second one ends it at once.
    """
    level = log_level(level, quiet=quiet)
    with ignoring_hangup():
        settings = load_run(config, overrides or ())
        for caution in cautions(settings) if level is not LogLevel.ERROR else ():
            print_text(f"flexmarl: caution: {caution}", err=True)
        with working("loading PyTorch and the team", quiet=level.quiet):
            run = commands.assemble_run(settings, resume_from=resume)
        try:
            log = EventLog(level, partial(print_text, err=True))
            summary = run.train(SafeConsole(quiet=level.quiet), log.hear)
        except KeyboardInterrupt:
            print_text(f"flexmarl: stopped. {commands.resume_hint(run.folder)}", err=True)
            raise typer.Exit(130) from None
        except StoreInUse:  # The run goes on, in another process.
            raise
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # User code may raise the last two.
            print_text(f"flexmarl: the run failed. {commands.resume_hint(run.folder, error)}", err=True)
            if (failures := RunFolder(run.folder).failures).is_dir():
                print_text(f"flexmarl: the first traceback of each kind of failed episode: {failures}", err=True)
            raise
        print_text(str(run.folder))
        if failed := all_failed(summary.troubles):
            print_text(f"flexmarl: {failed}; tracebacks: {summary.failures}", err=True)
            raise typer.Exit(ALL_FAILED)


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run folder (its newest checkpoint, or another one) or a YAML file (its models as they are).",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    step: Step = None,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Evaluate a trained team, or an untrained one, on held-out tasks.

    The first line printed names the checkpoint that was played, the last one the folder of what was played, for
    `flexmarl show`.
    """
    with working(f"loading {source}, and playing its held-out tasks"):
        evaluation, checkpoint, kept, failures, asked, caution = evaluate_and_keep(
            source, overrides or (), _which(step, best)
        )
    if as_json:
        paths = {"checkpoint": checkpoint, "folder": kept}
        shown = {name: None if path is None else str(path) for name, path in paths.items()}
        print_text(json_text({**asdict(evaluation), **shown}, figures=True))
    else:
        print_text(f"played: {checkpoint or f'the models of {source} as they are'}")
        _show_evaluation(
            evaluation, evaluation_figures(kept) if kept and evaluation.episodes > evaluation.failed else {}
        )
        if kept is not None:
            print_text(str(kept))
    if caution:
        print_text(f"flexmarl: caution: {caution}", err=True)
    if evaluation.episodes < asked:
        said = f"evaluate.tasks asks for {asked} episodes, and the tasks that are held out give {evaluation.episodes}"
        print_text(f"flexmarl: caution: {said}: all of them were played", err=True)
    if evaluation.failed:
        for reason, count in evaluation.failures.items():
            print_text(f"flexmarl: {count} of {evaluation.episodes} episodes failed: {reason}", err=True)
        if first := next((one for one in failures if str(one.failure) == next(iter(evaluation.failures))), None):
            print_text(f"flexmarl: the first of these was {first.episode}\n{first.traceback}".rstrip(), err=True)
    if evaluation.failed and evaluation.failed == evaluation.episodes:
        raise typer.Exit(ALL_FAILED)


def serve(
    config: Config,
    overrides: Overrides = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the gateway; 0: a free one.", show_default=False)
    ] = None,
) -> None:
    """Serve the seats of CONFIG's team to programs, without training: to try an agent by hand, or from a driver.

    The only line printed is JSON, once it serves: the URL, the admin key, the run folder. POST /episodes begins an
    episode (docs/howto/gateway.md). It serves until Ctrl-C or SIGTERM.
    """
    settings = load_run(config, overrides or ())
    serving.serve(settings, lambda said: print_text(json_text(said)), port=port)


def _which(step: int | None, best: bool) -> "Which":
    """Returns the checkpoint that the options choose. Raises ConfigError if both are given."""
    if step is not None and best:
        raise ConfigError("--step and --best exclude each other; use one of them")
    return step if step is not None else "best" if best else "newest"


def _show_evaluation(evaluation: "Evaluation", figures: Mapping[str, Measured]) -> None:
    """Prints the figures with their intervals, and how many episodes have each, as far as the episodes are kept."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{evaluation.episodes} held-out episodes, {evaluation.failed} failed")
    for column in ("mean", "95% interval", "episodes")[: 3 if figures else 1]:
        table.add_column(column, justify="right")

    def add_row(label: str, value: str, name: str) -> None:
        of = figures.get(name)
        table.add_row(label, value, *((bounds(of.interval(), "{:.3f}"), str(len(of.values))) if of else ()))

    for name, value in evaluation.metrics.items():
        add_row(name, f"{value:.3f}", name)
    for agent, reward in evaluation.rewards.items():
        add_row(f"{agent}: reward", f"{reward:.3f}", f"{REWARD}{agent}")
    if evaluation.failed:
        table.caption = "Means are of finished episodes; a failed one counts 0 for success alone."
    SafeConsole().print(table)


def check(config: Config, overrides: Overrides = None) -> None:
    """Validate CONFIG and look at this machine. Exit code 2 if the config is wrong; a to-do is no error."""
    settings = load_run(config, overrides or ())  # Before `examine` loads PyTorch: a misspelt key is told at once,
    if isinstance(settings.tasks, JsonlTasks):  # and so is a faulty row.
        settings.tasks.open(seed=settings.seed, base=settings.base)
    with working("loading PyTorch, and looking at the config and this machine"):
        findings, problems = examine.examine(settings)
    table = Table(box=box.SIMPLE_HEAD, title=str(config))
    for column in ("", "subject", "found", "to do"):
        table.add_column(column, overflow="fold", no_wrap=column == "subject")
    for finding in findings:
        table.add_row("!" if finding.todo else "ok", *finding, style="yellow" if finding.todo else None)
    SafeConsole().print(table)
    if problems:
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in problems))
    todos = sum(bool(finding.todo) for finding in findings)
    SafeConsole().print(f"The config is valid; {todos or 'nothing'} to do.")


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(help="Where to write; each policy gets a folder of its own.", show_default=False)
    ],
    step: Step = None,
    best: Best = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write adapters alone; each needs its base.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Write whole models.")] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Upload to this repository of the Hugging Face hub, or to REPO-POLICY for each of several policies.",
            show_default=False,
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make new repositories public, not private.")] = False,
) -> None:
    """Write each trained policy so that `AutoModelForCausalLM.from_pretrained` loads it, with a model card.

    Without --adapter or --merged, `training.lora.export` decides.
    """
    which = _which(step, best)
    if adapter and merged:
        raise ConfigError("--adapter and --merged exclude each other; use one of them")
    settings, folder = load_run_folder(run)
    form = "adapter" if adapter else "merged" if merged else None
    with working(f"exporting the policies of {run}"):
        exported = exports.export_policies(settings, folder, out, which=which, form=form)
    for one in exported:
        print_text(str(one.path))
    if push is not None:
        alone = len(exported) == 1
        for address in exports.push(
            {push if alone else f"{push}-{one.policy}": one for one in exported}, public=public
        ):
            print_text(address)


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")] = False,
) -> None:
    """Remove processes, shared memory and temporary files of runs whose controller is dead; live runs stay as they are.

    A run cleans up after itself, even after kill -9. This command is for machines that went down during a run, and for
    sandboxes of E2B that a killed run left. It removes only what runs of yours made.
    """
    root = leases_root()
    lines = chain(cleaned(root, dry_run=dry_run), ended_sandboxes(dry_run=dry_run))
    print_text(next(lines, f"Nothing to clean: no dead run left anything in {root}."))
    for line in lines:
        print_text(line)


def cleaned(root: Path, *, dry_run: bool) -> Iterator[str]:
    """Removes what dead runs left, and yields a line for each thing. Files that belong to no run stay, and are named.

    Raises ConfigError if `root` is not this user's alone, FlexmarlError if something cannot be removed.
    """
    for folder in abandoned(root):
        leases = read_leases(folder)
        processes = live_processes(leases)
        paths = held_paths(folder)
        yield f"{'would remove' if dry_run else 'removing'} what the run {leases.run} left:"
        yield from (f"  process {process.pid}" for process in processes)
        yield from (f"  {path}" for path in paths)
        if dry_run:
            continue
        release(folder)
        if left := [*(f"process {process.pid}" for process in live_processes(leases)), *map(str, held_paths(folder))]:
            raise FlexmarlError(f"cannot remove {', '.join(left)}: end or delete it as its owner")
    yield from (f"left as it is: {str(path)!r} {why}" for path, why in foreign_paths(root))


def ended_sandboxes(*, dry_run: bool) -> Iterator[str]:
    """Ends the sandboxes of E2B that dead processes left, with a line for each. Raises ConfigError without a key."""
    for leased in left_sandboxes():
        yield f"{'would end' if dry_run else 'ending'} the E2B sandbox {leased.sandbox_id} of process {leased.pid}"
        if not dry_run:
            boxes.end_sandbox(leased)
