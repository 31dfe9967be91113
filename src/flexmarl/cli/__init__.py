"""The command line. In: a config and dotted overrides. Out: a run, figures, a verdict, a model, a table.

Exit codes: 0, done; 1, the command failed; 2, the config or the command is wrong; 3, done, but every episode of the run
or of its last evaluation failed; 130, stopped with Ctrl-C; 141, the reader of the output has gone (`| head`). `train`
and `simulate` continue without a reader.
"""

import asyncio
import sys
import threading

import typer

from flexmarl.cli.compare import compare
from flexmarl.cli.init import init
from flexmarl.cli.mcp_servers import mcp
from flexmarl.cli.runs import check, clean, evaluate, export, serve, train
from flexmarl.cli.sandboxes import sandbox
from flexmarl.cli.show import show
from flexmarl.cli.simulate import simulate
from flexmarl.cli.store import store
from flexmarl.cli.terminal import print_text, safe_streams
from flexmarl.cluster.hard_stop import leave_stuck_threads
from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.events.safe_json import masked

CANCELLED = (
    "the run was cancelled, but not by Ctrl-C or SIGTERM: your code cancels tasks that it did not make; in a "
    "workflow or a tool, cancel your own tasks, and not those of asyncio.all_tasks()"
)

app = typer.Typer(
    name="flexmarl",
    help="Train teams of LLM agents with reinforcement learning.",
    epilog="Start with: flexmarl init NAME, or flexmarl check RUN.yaml, then flexmarl train RUN.yaml. Exit codes: 0 "
    "done; 1 failed; 2 wrong config or command; 3 done, but every episode of the run or of its last evaluation failed; "
    "130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(train)
app.command("eval")(evaluate)
app.command()(serve)
app.command()(simulate)
app.command()(check)
app.command()(export)
app.command()(show)
app.command()(compare)
app.command()(store)
app.command()(mcp)
app.command()(clean)
app.add_typer(sandbox, name="sandbox")


def main() -> None:
    """Runs a command. A FlexmarlError becomes lines on stderr and an exit code; any other error shows a traceback."""
    threads = frozenset(threading.enumerate())
    try:
        with safe_streams():
            _run_command()
    except BaseException as end:
        code = end.code if isinstance(end, SystemExit) else 1
        leave_stuck_threads(threads, code if isinstance(code, int) else int(bool(code)))
        raise


def _run_command() -> None:
    try:
        app()
    except SystemExit as end:
        if end.__context__ is not None and isinstance(end.__context__.__cause__, KeyboardInterrupt):
            print_text("flexmarl: stopped", err=True)  # Typer ended a command that does not say so itself.
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except asyncio.CancelledError:
        print_text(f"flexmarl: {CANCELLED}", err=True)
        sys.exit(1)
    except Exception as error:
        sys.exit(print_error(error))


def print_error(error: Exception) -> int:
    """Prints an error of flexmarl's on stderr, without secrets, and returns the exit code. Raises any other error."""
    ours = flexmarl_errors(error)
    if not ours:
        raise error
    # Masked before it is split, since a secret may follow its name on the next line.
    for line in dict.fromkeys(line for one in ours for line in masked(str(one)).splitlines()):
        print_text(f"flexmarl: {line}", err=True)
    return 2 if any(isinstance(one, ConfigError) for one in ours) else 1


def flexmarl_errors(error: Exception) -> list[FlexmarlError]:
    """Returns `error`, or the errors in an exception group, if all are FlexmarlErrors; otherwise an empty list."""
    if isinstance(error, FlexmarlError):
        return [error]
    if not isinstance(error, ExceptionGroup):
        return []
    held = [flexmarl_errors(inner) for inner in error.exceptions]
    return [one for ours in held for one in ours] if all(held) else []
