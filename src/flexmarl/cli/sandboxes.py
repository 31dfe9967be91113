"""`flexmarl sandbox`: runs a program in a box, and tries what boxes guarantee on this machine, or at a service."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from flexmarl.cli.options import Overrides, boxes
from flexmarl.cli.terminal import print_text
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.events.progress import SafeConsole
from flexmarl.events.safe_json import json_text
from flexmarl.sandbox.interface import BoxOutcome
from flexmarl.sandbox.probe import check_guarantees
from flexmarl.sandbox.settings import AnySandbox, SandboxSettings

sandbox = typer.Typer(help="Run a program in a box, or try what boxes guarantee here.", no_args_is_help=True)
Accept = Annotated[
    list[str] | None, typer.Option(help="A weaker guarantee that is good enough: rlimits.", show_default=False)
]


def _settings(accept: Sequence[str], **values: int) -> SandboxSettings:
    if wrong := [one for one in accept if one != "rlimits"]:
        raise ConfigError(f"--accept takes rlimits, got {wrong[0]!r}")
    return SandboxSettings.model_validate({**values, "accept": tuple(accept)})


@sandbox.command()
def probe(
    config: Annotated[
        Path | None, typer.Argument(help="A run's YAML file, whose sandbox is tried.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    accept: Accept = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try every guarantee of a box: on this machine, or as a config says. Exit code 2 if one is missing."""
    if config is not None and accept:
        raise ConfigError(f"--accept is for probes without a config, got {', '.join(accept)}; set sandbox.accept there")
    settings: AnySandbox = load_run(config, overrides or []).sandbox if config else _settings(accept or ())
    found = boxes.guarantees_of(settings)
    if as_json:
        print_text(json_text({one.name: asdict(one) for one in found}))
    else:
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("", "guarantee", "found", "to do"):
            table.add_column(column, overflow="fold")
        for one in found:
            style = None if one.held else "yellow"
            table.add_row("ok" if one.held else "!", one.name, one.found, one.remedy, style=style)
        SafeConsole().print(table)
    check_guarantees(found, "it was asked for", where=boxes.place_of_boxes(settings))


@sandbox.command("exec")
def execute(
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole outcome as JSON.")] = False,
    timeout: Annotated[float, typer.Option(min=0.01, help="Most seconds.")] = 10.0,
    memory: Annotated[int, typer.Option(min=32, help="Most MiB.")] = 256,
    accept: Accept = None,
) -> None:
    """Run the Python program on standard input in a box, after every guarantee was tried.

    Exit code: that of the program; 1 if it did not end by itself; 2 if a guarantee is missing, and then it is not run.
    """
    settings = _settings(accept or (), memory_mib=memory)
    check_guarantees(boxes.guarantees_of(settings), "a program would run in a box")
    outcome = asyncio.run(_run(settings, sys.stdin.read(), timeout))
    if as_json:
        print_text(json_text(asdict(outcome)))
    else:
        for text, err in ((outcome.stdout, False), (outcome.stderr, True)):
            if text:
                print_text(text.rstrip("\n"), err=err)
        if not outcome.ok:
            print_text(f"flexmarl: {outcome.ended}, exit status {outcome.exit}", err=True)
    raise typer.Exit(0 if outcome.ok else outcome.exit if outcome.exit and 0 < outcome.exit < 256 else 1)


async def _run(settings: SandboxSettings, code: str, timeout_s: float) -> BoxOutcome:
    try:
        async with boxes.sandbox_for(settings).open() as opened:
            return await opened.run(code, timeout_s=timeout_s)
    except EpisodeError as error:
        raise ConfigError(f"sandbox: {error}") from error
