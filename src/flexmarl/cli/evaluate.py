"""`flexmarl eval`: plays held-out tasks, without training."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flexmarl.cli.options import Overrides, assemble, load_run_folder
from flexmarl.cli.terminal import SafeConsole, say
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.events.safe_json import json_text


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run folder (its newest checkpoint) or a YAML file (its models as they are).", show_default=False
        ),
    ],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Evaluate a trained team, or an untrained one, on held-out tasks."""
    if source.is_dir():
        settings, folder = load_run_folder(source, overrides)
        checkpoints = folder.checkpoints
    elif source.suffix in (".yaml", ".yml"):
        settings, checkpoints = load_run(source, overrides or ()), None
    else:
        raise ConfigError(
            f"'{source}' is neither a run folder nor a YAML file; give the path that `train` printed last"
        )
    if not settings.evaluate.tasks:
        raise ConfigError("evaluate.tasks is 0, so there is nothing to play; add evaluate.tasks=64 to the command")
    evaluation = assemble.evaluate_once(settings, checkpoints)
    if as_json:
        say(json_text(asdict(evaluation), figures=True))
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{evaluation.episodes} held-out episodes, {evaluation.failed} failed")
    table.add_column("mean", justify="right")
    for name, value in evaluation.metrics.items():
        table.add_row(name, f"{value:.3f}")
    for agent, reward in evaluation.rewards.items():
        table.add_row(f"{agent}: reward", f"{reward:.3f}")
    SafeConsole().print(table)
