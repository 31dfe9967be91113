"""Terminal of a command: what models and tasks say cannot steer it, and a run outlives it.

              its reader has gone            the terminal is closed (SIGHUP)     stdout is not there at all
train         goes on in silence             goes on in silence                  goes on in silence
simulate      goes on in silence             goes on in silence                  goes on in silence
the others    end with exit code 141         end, as any program                 nothing is printed
"""

import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

import typer
from rich.console import Console
from rich.segment import Segment

READER_GONE = 141
"""Exit code of a command whose reader has gone: that of a process which SIGPIPE ended."""
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of writing, and lone surrogates."""


def printable(text: str) -> str:
    r"""A text that a terminal shows and does not obey.

    >>> print(printable("\x1b[2J\u202eabc"))
    \x1b[2J\u202eabc
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def say(text: str, *, err: bool = False) -> None:
    """Prints lines on stdout, or stderr."""
    typer.echo(printable(text), err=err)


class SafeConsole(Console):
    """Console of rich on which only rich itself steers the terminal, not what is printed."""

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(printable(part.text), part.style) for part in buffer
        )


class Outlet:
    """Stream of a command whose reader may go; what it cannot encode is escaped. All else is the stream's own."""

    def __init__(self, stream: Any, *, endures: bool) -> None:
        self._stream = stream
        self.endures = endures
        """Whether writing goes on, to nobody, when the reader has gone; else the command ends."""

    def write(self, text: str) -> int:
        """As the stream's; of a stream that takes nothing any more, nothing."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """As the stream's."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        """Gone readers get nothing any more, from C and from child processes neither; a full disk loses lines."""
        if error.errno in _GONE:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            if not self.endures:
                raise SystemExit(READER_GONE)
        elif not self.endures:
            raise error


@contextmanager
def outlets() -> Iterator[None]:
    """In the block stdout and stderr are outlets; of a command that was started without them, to nowhere."""
    for _ in range(3):  # A file that we opened as number 1 would be written to by whoever prints.
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
    before, sys.excepthook = (sys.stdout, sys.stderr), _show_bug
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open for as long as the process
    sys.stdout = cast("TextIO", Outlet(sys.stdout or nowhere, endures=False))
    sys.stderr = cast("TextIO", Outlet(sys.stderr or nowhere, endures=True))
    try:
        yield
    except SystemExit as ended:
        if not ended.code:
            sys.stdout.flush()  # Now is when the last lines find that nobody reads them.
        raise
    finally:
        with suppress(SystemExit, OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with suppress(OSError):
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


@contextmanager
def outlived() -> Iterator[None]:
    """In the block the command outlives its terminal, as with nohup: SIGHUP is ignored, by child processes too."""
    outlet, on_main = sys.stdout, threading.current_thread() is threading.main_thread()
    if isinstance(outlet, Outlet):
        outlet.endures = True
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if on_main else None
    try:
        yield
    finally:
        if on_main:
            signal.signal(signal.SIGHUP, before or signal.SIG_DFL)
