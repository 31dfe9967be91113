"""Terminal of a command: texts of models and tasks cannot control it, and a run outlives it.

              its reader has gone            the terminal is closed (SIGHUP)     there is no stdout
train         continues silently             continues silently                  continues silently
simulate      continues silently             continues silently                  continues silently
the others    end with exit code 141         end like any program                print nothing
"""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

import typer

from flexmarl.events.progress import SafeConsole, printable
from flexmarl.events.safe_json import masked

READER_CLOSED = 141
"""Exit code of a command whose reader has gone, as of a process that SIGPIPE ended."""
_CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


def print_text(text: str, *, err: bool = False) -> None:
    """Prints the text on stdout. With `err`, prints it on stderr, with secrets masked as in the journal."""
    typer.echo(printable(masked(text) if err else text), err=err)


def working(on: str, *, quiet: bool = False) -> AbstractContextManager[object]:
    """Shows on a terminal what a block that prints nothing works on. Nothing of it is left there, or in a log."""
    return SafeConsole(quiet=quiet, stderr=True).status(printable(on))


class SafeStream:
    """Output stream whose reader may go. Text that it cannot encode is escaped. The rest is the inner stream's."""

    def __init__(self, stream: Any, *, endures: bool) -> None:
        self._stream = stream
        self.endures = endures
        """True if the command continues without output when the reader has gone; False if it then ends."""

    def write(self, text: str) -> int:
        """Writes to the inner stream. If that fails and the command continues, the text is lost."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flushes the inner stream; errors are handled as by `write`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        """Handles a failed write. Unless the stream endures, this ends the command.

        If the reader has gone, the descriptor leads to /dev/null from now on, also for C code and child processes.
        Other errors, such as a full disk, only lose the text of a stream that endures.
        """
        if error.errno in _CLOSED:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            if not self.endures:
                raise SystemExit(READER_CLOSED)
        elif not self.endures:
            raise error


@contextmanager
def safe_streams() -> Iterator[None]:
    """Makes stdout and stderr safe streams in the block. If one is missing, a stream to nowhere replaces it."""
    for _ in range(3):  # Fills descriptors 0 to 2: a file opened as number 1 would get what is printed.
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
    before, sys.excepthook = (sys.stdout, sys.stderr), _show_bug
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open for as long as the process
    sys.stdout = cast("TextIO", SafeStream(sys.stdout or nowhere, endures=False))
    sys.stderr = cast("TextIO", SafeStream(sys.stderr or nowhere, endures=True))
    try:
        yield
    except SystemExit as ended:
        if not ended.code:
            sys.stdout.flush()  # Only now may the last lines find that the reader has gone.
        raise
    finally:
        with suppress(SystemExit, OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with suppress(OSError):
        sys.stderr.write(printable(masked("".join(traceback.format_exception(kind, error, trace)))))


@contextmanager
def ignoring_hangup() -> Iterator[None]:
    """Lets the command outlive its terminal inside the block, as with nohup: it and its children ignore SIGHUP."""
    stream, on_main = sys.stdout, threading.current_thread() is threading.main_thread()
    if isinstance(stream, SafeStream):
        stream.endures = True
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if on_main else None
    try:
        yield
    finally:
        if on_main:
            signal.signal(signal.SIGHUP, before or signal.SIG_DFL)
