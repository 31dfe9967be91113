"""`flexmarl compare`: figures of runs side by side, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flexmarl.analysis.comparison import (
    ComparedFigure,
    compare_runs,
    differing_settings,
    read_figures,
    settings_in_short,
)
from flexmarl.analysis.intervals import Estimate, bounds
from flexmarl.api.handle import run_folder
from flexmarl.cli.terminal import print_text
from flexmarl.config.load import read_yaml
from flexmarl.errors import ConfigError
from flexmarl.events.progress import SafeConsole
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text

UNBOUNDED = 10_000
"""Columns of a screen on which every table fits."""
MOST_SETTINGS, MOST_LETTERS = 20, 40
"""Settings that are shown, and letters of a value."""


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN [RUN]...", help="Run folders.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare figures of runs, each with the interval that holds the true one in 95 of 100 cases.

    The differences are those to the first run.
    """
    if len(runs) < 2:
        raise ConfigError(f"compare takes two run folders or more, got {len(runs)}")
    # As they were written, so that no code is imported: two copies of a team register the same names.
    settings = [read_yaml(run_folder(path).config) for path in runs]
    figures = [read_figures(RunFolder(path), of["tasks"]) for path, of in zip(runs, settings, strict=True)]
    compared = compare_runs(figures)
    if not compared:
        raise ConfigError("these runs have no figure yet: no step and no evaluation of theirs has ended")
    differing = differing_settings(settings)
    if as_json:
        values = {
            "runs": [str(path) for path in runs],
            "figures": [asdict(figure) for figure in compared],
            "settings": {key: list(of) for key, of in differing.items()},
        }
        print_text(json_text(values, figures=True))
        return
    console = SafeConsole()
    for number, figure in enumerate(figures, start=1):
        console.print(f"{number}: {figure.name}", soft_wrap=True)
    table, notes = fitting(compared, len(runs), console)
    console.print(table)
    console.print("[low, high]: 95% interval. One that holds 0 says that the difference may be chance.")
    for mark, how in notes.items():
        console.print(f"{mark} {how}")
    console.print(f"\n{len(differing)} settings differ{':' if differing else '.'}")
    if differing:
        console.print(of_settings(settings_in_short(settings, differing), len(runs)))


def fitting(compared: list[ComparedFigure], runs: int, console: Console) -> tuple[Table, dict[str, str]]:
    """Returns `comparison`, the narrow one if the other does not fit on the screen."""
    table, notes = comparison(compared, runs)
    unbounded = console.options.update(width=UNBOUNDED)
    fits = console.measure(table, options=unbounded).maximum <= console.width
    return (table, notes) if fits else comparison(compared, runs, narrow=True)


def comparison(compared: list[ComparedFigure], runs: int, *, narrow: bool = False) -> tuple[Table, dict[str, str]]:
    """Returns a row for each figure: its value in every run, and the differences to the first run.

    Also the notes by mark: how the intervals of a row were found. `narrow`: an interval stands below its figure.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=not narrow, pad_edge=not narrow, collapse_padding=narrow)
    between = "\n" if narrow else " "
    table.add_column("", overflow="fold")
    for number in range(1, runs + 1):
        table.add_column(str(number), justify="right", overflow="fold")
    for number in range(2, runs + 1):
        table.add_column(f"{number} - 1", justify="right", overflow="fold")
    if not narrow:
        table.add_column("", style="dim", overflow="fold")
    marks: dict[str, str] = {}
    for figure in compared:
        found = [one for one in (*figure.values, *figure.differences[1:]) if one is not None]
        how = "; ".join(dict.fromkeys(one.how for one in reversed(found) if one.how))
        mark = marks.setdefault(how, f"({len(marks) + 1})") if how else ""
        name = f"{figure.name.replace(', ', f',{between}', 1)} {mark}".rstrip() if narrow else figure.name
        table.add_row(
            name,
            *(written(value, between=between) for value in figure.values),
            *(written(value, signed=True, between=between) for value in figure.differences[1:]),
            *(() if narrow else (mark,)),
        )
    return table, {mark: how for how, mark in marks.items()}


def of_settings(differing: Mapping[str, Sequence[Any]], runs: int) -> Table:
    """Returns a row for each setting, or each policy or agent, that differs: its value in every run.

    Those that explain most come first. The rest is in the JSON.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("setting", *map(str, range(1, runs + 1))):
        table.add_column(column, overflow="fold")
    for key, of in [*differing.items()][:MOST_SETTINGS]:
        table.add_row(key, *("" if value is None else shortened(str(value)) for value in of))
    if (more := len(differing) - MOST_SETTINGS) > 0:
        table.add_row(f"and {more} more, in --json", *("" for _ in range(runs)))
    return table


def shortened(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def written(interval: Estimate | None, *, signed: bool = False, between: str = " ") -> str:
    """A figure and its interval; `-` if it was not measured.

    >>> written(Estimate(0.25, 0.125, 0.5, "Wilson, 64 episodes"))
    '0.25 [0.125, 0.5]'
    """
    if interval is None:
        return "-"
    shown = "{:+.3g}" if signed and interval.value else "{:.3g}"
    of = bounds(interval)
    return f"{shown.format(interval.value)}{between if of else ''}{of}"
