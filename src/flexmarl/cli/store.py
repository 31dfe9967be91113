"""`flexmarl store`: queries a run's experience with SQL, during the run or later, and copies it to Parquet."""

import csv
import shlex
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.measure import Measurement
from rich.table import Table as Screen
from rich.text import Text

from flexmarl.cli.terminal import print_text
from flexmarl.errors import ConfigError, StoreError
from flexmarl.events.progress import SafeConsole, printable
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text
from flexmarl.experience.interface import Table
from flexmarl.experience.parquet import export_parquet
from flexmarl.experience.schema import CODECS, META_COLUMNS, SHARED_TABLES, as_text, quote
from flexmarl.experience.store_file import StoreReader, read_store

CONSOLE = SafeConsole()
CELL, SHORT = 60, 24
"""Most characters of a cell on the screen; columns up to SHORT are never narrowed. --csv and --json print all."""
UNBOUNDED = 100_000
"""Width at which a table is measured."""
MISTAKES = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_AUTH)
"""SQLite's codes for SQL that is wrong or would write. Any other code is about the file."""


def store(
    run: Annotated[Path, typer.Argument(help="A run folder, or the .sqlite file in it.", show_default=False)],
    sql: Annotated[str | None, typer.Argument(help="One SELECT; without it, what the store has.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as a JSON list of objects.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows on the screen; --csv and --json print all.")] = 50,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write one Parquet file per agent there.", show_default=False)
    ] = None,
) -> None:
    """Query the experience of RUN, also while it runs. `payload(column)` shows texts and tensors."""
    if (as_csv, as_json, parquet is not None).count(True) > 1:
        raise ConfigError("--csv, --json and --parquet exclude each other; give one of them")
    if (as_csv or as_json) and sql is None:
        raise ConfigError("--csv and --json print what a SELECT gives, and there is none; give one after RUN")
    if parquet and sql is not None:
        raise ConfigError(f"--parquet copies the agents' tables whole, got {sql!r} with it; use --csv for a SELECT")
    with read_store(_file(run)) as reader:
        if parquet:
            for path in export_parquet(reader, parquet):
                print_text(str(path))
        elif sql is None:
            _show_tables(run, reader)
        else:
            found = _select(reader, sql)
            if as_csv:
                _print_csv(found)
            elif as_json:
                _print_json(found)
            else:
                _show(found, limit)


def _file(run: Path) -> Path:
    """Returns the store's file in a run folder, or `run` itself if it is a file. Raises ConfigError."""
    if run.is_file():
        return run
    folder = RunFolder(run)
    if folder.store.is_file():
        return folder.store
    name = folder.store.name
    if folder.config.is_file():
        raise ConfigError(f"'{run}' has no {name}: its rows were kept in memory; `store.type: sqlite` keeps them")
    raise ConfigError(f"'{run}' is no run folder: it has no {name}; give the path that `train` printed last")


def _select(reader: StoreReader, sql: str) -> Table:
    try:
        found = reader.query(sql)
    except StoreError as error:
        if getattr(error.__cause__, "sqlite_errorcode", sqlite3.SQLITE_ERROR) not in MISTAKES:
            raise
        tables = ", ".join([*reader.agents, *SHARED_TABLES])
        raise ConfigError(f"{error}; tables: {tables}; `flexmarl store RUN` shows their columns") from error
    rows = [tuple(as_text(cell) if isinstance(cell, bytes) else cell for cell in row) for row in found.rows]
    return Table(found.columns, tuple(rows))


def _print_csv(found: Table) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(found.columns)
    shown = printable if sys.stdout.isatty() else str
    writer.writerows([shown(cell) if isinstance(cell, str) else cell for cell in row] for row in found.rows)


def _print_json(found: Table) -> None:
    if len(set(found.columns)) < len(found.columns):
        raise ConfigError(f"columns must differ to be keys of JSON, got {', '.join(found.columns)}; rename with AS")
    print_text(json_text([dict(zip(found.columns, row, strict=True)) for row in found.rows]))


def _show(found: Table, limit: int) -> None:
    screen = Screen(box=box.SIMPLE_HEAD)
    rows = found.rows[:limit]
    for index, name in enumerate(found.columns):
        cells = [row[index] for row in rows]
        numbers = bool(cells) and all(isinstance(cell, int | float | None) for cell in cells)
        short = all(len(_shown(cell)) <= SHORT for cell in cells)
        screen.add_column(name, justify="right" if numbers else "left", no_wrap=short)
    for row in rows:
        screen.add_row(*map(_line, row))
    unbounded = CONSOLE.options.update(width=UNBOUNDED)
    if rows and Measurement.get(CONSOLE, unbounded, screen).minimum > CONSOLE.width:
        _show_records(found.columns, rows)
    else:
        CONSOLE.print(screen)
    hidden = len(found.rows) - limit
    if hidden > 0:
        CONSOLE.print(f"{hidden} more rows: use --limit {len(found.rows)}, --csv or --json, or LIMIT in the SQL")


def _show_records(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints each row as a table of its own, a line per column: for screens that are too narrow for the columns."""
    for number, row in enumerate(rows, 1):
        record = Screen("column", f"row {number}", box=box.SIMPLE_HEAD)
        for name, cell in zip(columns, row, strict=True):
            record.add_row(name, _line(cell))
        CONSOLE.print(record)


def _line(cell: Any) -> Text:
    return Text(_shown(cell), no_wrap=True, overflow="ellipsis")


def _shown(cell: Any) -> str:
    """Returns a cell as one line of at most CELL characters."""
    if cell is None:
        return ""
    line = printable(" ".join((f"{cell:.6g}" if isinstance(cell, float) else str(cell)[: 10 * CELL]).split()))
    return line if len(line) <= CELL else f"{line[: CELL - 1]}…"


def _show_tables(run: Path, reader: StoreReader) -> None:
    """Prints how many rows each agent has in each state, the columns, and two queries to start from."""
    counted = []
    for agent in reader.agents:
        states = reader.query(f"SELECT state, count(*) FROM {quote(agent)} GROUP BY state ORDER BY 2 DESC").rows
        counted.append((agent, sum(n for _, n in states), ", ".join(f"{n} {state}" for state, n in states)))
    _show(Table(("table", "rows", "of these"), tuple(counted)), len(counted))
    data = [f"{c.name} ({c.kind}{', payload' if CODECS[c.kind].by_reference else ''})" for c in reader.columns]
    CONSOLE.print(f"Columns of each: {', '.join([*META_COLUMNS, *data])}; each data column also has NAME_status.")
    CONSOLE.print(f"Other tables: {', '.join(SHARED_TABLES)}. A payload is read with payload(NAME). Examples:\n")
    for sql in _examples(reader):
        CONSOLE.print(f"flexmarl store {shlex.quote(str(run))} {shlex.quote(sql)}", soft_wrap=True)


def _examples(reader: StoreReader) -> Iterator[str]:
    table = quote(reader.agents[0])
    yield f"SELECT policy_version, state, count(*) AS n FROM {table} GROUP BY 1, 2"
    telling = [c for c in reader.columns if c.name in ("text", "reward")] or reader.columns[-2:]
    cells = [f"payload({quote(c.name)})" if CODECS[c.kind].by_reference else quote(c.name) for c in telling]
    yield f"SELECT {', '.join(['sample_id', *cells])} FROM {table} LIMIT 5"
