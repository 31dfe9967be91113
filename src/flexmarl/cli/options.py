"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from flexmarl.config import RunSettings, load_run
from flexmarl.errors import ConfigError
from flexmarl.observability.run_folder import RunFolder

Config = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted settings, e.g. batch.groups=8 seed=2.", show_default=False, metavar="[KEY=VALUE]..."),
]


def load_run_folder(path: Path, overrides: list[str] | None = None) -> tuple[RunSettings, RunFolder]:
    """The settings of a run that was trained. Raises ConfigError."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"'{path}' is no run folder: it has no config.yaml; give the path that `train` printed last")
    return load_run(folder.config, overrides or ()), folder
