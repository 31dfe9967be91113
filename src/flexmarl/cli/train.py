"""`flexmarl train`: trains a team, live on screen."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.options import Config, Overrides, assemble
from flexmarl.cli.terminal import SafeConsole, outlived, say
from flexmarl.config import cautions, load_run
from flexmarl.events.run_folder import RunFolder


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Go on from the newest checkpoint of this run folder; CONFIG is then the folder's config.yaml.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train the team that CONFIG describes. The last line printed is the run folder.

    A run outlives its terminal, as with nohup: Ctrl-C or SIGTERM end it.
    """
    with outlived():
        settings = load_run(config, overrides or ())
        for caution in cautions(settings):
            say(f"flexmarl: caution: {caution}", err=True)
        run = assemble.assemble_run(settings, going_on=resume)
        try:
            run.train(SafeConsole())
        except KeyboardInterrupt:
            say(f"flexmarl: stopped. {how_to_go_on(run.folder)}", err=True)
            raise typer.Exit(130) from None
        except (Exception, asyncio.CancelledError, SystemExit):  # User code may raise the last two.
            say(f"flexmarl: the run failed. {how_to_go_on(run.folder)}", err=True)
            raise
        say(str(run.folder))


def how_to_go_on(path: Path) -> str:
    """Returns a sentence with the last checkpoint of a run that ended early, and the command that continues it."""
    folder = RunFolder(path)
    again = f"flexmarl train {folder.config} --resume {path}"
    saved = assemble.newest_checkpoint(folder)
    if saved is None:
        return f"There is no checkpoint yet (see checkpoint.every); begin again with: {again}"
    return f"Last good checkpoint: {saved}; go on with: {again}"
