"""`flexmarl train`: trains a team, live on screen."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexmarl.assemble import assemble_run
from flexmarl.cli.options import Config, Overrides
from flexmarl.config import load_run


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the newest checkpoint of this run folder.", show_default=False)
    ] = None,
) -> None:
    """Train the team that CONFIG describes. The last line printed is the run folder."""
    run = assemble_run(load_run(config, overrides or ()), resume=resume)
    run.train(Console())
    typer.echo(str(run.folder))
