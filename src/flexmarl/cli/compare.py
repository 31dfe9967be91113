"""`flexmarl compare`: figures of runs side by side, with intervals."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flexmarl.analysis.comparison import ComparedFigure, compare_runs, read_figures
from flexmarl.analysis.intervals import Estimate
from flexmarl.api.handle import load_run_folder
from flexmarl.cli.terminal import print_text
from flexmarl.errors import ConfigError
from flexmarl.events.progress import SafeConsole
from flexmarl.events.safe_json import json_text


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN [RUN]...", help="Run folders.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare figures of runs, each with the interval that holds the true one in 95 of 100 cases.

    The differences are those to the first run.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare takes two run folders or more, got {len(runs)}")
    folders = [load_run_folder(path) for path in runs]
    figures = [read_figures(folder, settings.tasks.model_dump(mode="json")) for settings, folder in folders]
    compared = compare_runs(figures)
    if not compared:
        raise ConfigError("these runs have no figure yet: no step and no evaluation of theirs has ended")
    if as_json:
        values = {"runs": [str(path) for path in runs], "figures": [asdict(figure) for figure in compared]}
        print_text(json_text(values, figures=True))
        return
    console = SafeConsole()
    for number, figure in enumerate(figures, start=1):
        console.print(f"{number}: {figure.name}", soft_wrap=True)
    console.print(comparison(compared, len(runs)))
    console.print("[low, high]: 95% interval. One that holds 0 says that the difference may be chance.")


def comparison(compared: list[ComparedFigure], runs: int) -> Table:
    """A row for each figure: its value in every run, the differences to the first run, and how they were found."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", overflow="fold")
    for number in range(1, runs + 1):
        table.add_column(str(number), justify="right", overflow="fold")
    for number in range(2, runs + 1):
        table.add_column(f"{number} - 1", justify="right", overflow="fold")
    table.add_column("intervals", style="dim", overflow="fold")
    for figure in compared:
        found = [one for one in (*figure.values, *figure.differences[1:]) if one is not None]
        how = dict.fromkeys(one.how for one in reversed(found) if one.how)
        table.add_row(
            figure.name,
            *(written(value) for value in figure.values),
            *(written(value, signed=True) for value in figure.differences[1:]),
            "; ".join(how),
        )
    return table


def written(interval: Estimate | None, *, signed: bool = False) -> str:
    """A figure and its interval.

    >>> written(Estimate(0.25, 0.125, 0.5, "Wilson, 64 episodes"))
    '0.25 [0.125, 0.5]'
    """
    if interval is None:
        return ""
    shown = "{:+.3g}" if signed else "{:.3g}"
    bounds = "" if interval.low is None or interval.high is None else f" [{interval.low:.3g}, {interval.high:.3g}]"
    return f"{shown.format(interval.value)}{bounds}"
