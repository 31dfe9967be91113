"""Arguments that several commands share, and modules that import torch, loaded when a command first uses them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexmarl.events.log import LogLevel
from flexmarl.imports import Lazy

if TYPE_CHECKING:
    from flexmarl.analysis import plots
    from flexmarl.assemble import blueprint, boxes, commands, serving
    from flexmarl.assemble import export as exports
    from flexmarl.cli import examine, simulations
else:
    blueprint = Lazy("flexmarl.assemble.blueprint")
    boxes = Lazy("flexmarl.assemble.boxes")
    commands = Lazy("flexmarl.assemble.commands")
    exports = Lazy("flexmarl.assemble.export")
    serving = Lazy("flexmarl.assemble.serving")
    examine = Lazy("flexmarl.cli.examine")
    plots = Lazy("flexmarl.analysis.plots")
    simulations = Lazy("flexmarl.cli.simulations")

Config = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted settings, e.g. batch.groups=8 seed=2.", show_default=False, metavar="[KEY=VALUE]..."),
]
Level = Annotated[
    LogLevel,
    typer.Option(
        "--log-level", envvar="FLEXMARL_LOG", help="error, warning: no progress; debug: every decision with its reason."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The same as --log-level warning.")]


def log_level(level: LogLevel, *, quiet: bool) -> LogLevel:
    """Returns the level of a command, and sets that of the libraries which log by themselves, in its processes too."""
    level = LogLevel.WARNING if quiet and not level.quiet else level
    if level is not LogLevel.INFO:  # At info, theirs is what they choose themselves.
        of_libraries = {LogLevel.DEBUG: "info"}.get(level, level.value)
        os.environ |= {"TRANSFORMERS_VERBOSITY": of_libraries, "HF_HUB_VERBOSITY": of_libraries}
    return level
