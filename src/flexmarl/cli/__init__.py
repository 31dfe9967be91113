"""The command line. In: a config and dotted overrides. Out: a run, an evaluation, a verdict on a config, a model."""

import sys

import typer

from flexmarl.cli.check import check
from flexmarl.cli.evaluate import evaluate
from flexmarl.cli.export import export
from flexmarl.cli.train import train
from flexmarl.errors import ConfigError, FlexmarlError

app = typer.Typer(
    name="flexmarl",
    help="Train teams of LLM agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command("eval")(evaluate)
app.command()(check)
app.command()(export)


def main() -> None:
    """Runs a command; our own errors become one message and an exit code (2: the config, 1: anything else)."""
    try:
        app()
    except FlexmarlError as error:
        sys.exit(_report(error))
    except ExceptionGroup as group:
        ours = _first_of_ours(group)
        if ours is None:
            raise
        sys.exit(_report(ours))


def _report(error: FlexmarlError) -> int:
    typer.echo(f"flexmarl: {error}", err=True)
    return 2 if isinstance(error, ConfigError) else 1


def _first_of_ours(group: BaseExceptionGroup[BaseException]) -> FlexmarlError | None:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            error = _first_of_ours(error)
        if isinstance(error, FlexmarlError):
            return error
    return None
