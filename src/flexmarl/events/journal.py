"""Journal on a JSON Lines file: every event of a run, one line each (event.py makes the line).

    {"t":0.0,"event":"journal","format":3}                                         the first line
    {"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1,"task":"add-3"}

The journal is a listener like any other: `events.listen(Event, journal.write)`. It is not read during the run.

The process that writes may be killed at any moment. Each line is written at once, so at most the line in work is lost.
A line counts only with its newline: readers skip an unfinished last line, and `append_lines` cuts it off before it
continues a file.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from flexmarl.errors import FlexmarlError
from flexmarl.events.catalogue import CATALOGUE
from flexmarl.events.event import Event, Events, from_json, to_json
from flexmarl.events.run_events import RunStarted
from flexmarl.events.safe_json import parse_json


def append_lines(path: Path) -> TextIO:
    """Opens the file to append lines; makes it if it does not exist. A line goes to the file with its newline."""
    if path.exists():
        _cut_torn_line(path)
    return path.open("a", buffering=1, encoding="ascii", newline="\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in order, without a torn last line.

    Raises FlexmarlError, with the number of the line, for any other line that is no JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = parse_json(line)
            except ValueError as error:
                raise FlexmarlError(f"{path}, line {number}: not JSON ({error}); remove that line") from error
            if not isinstance(entry, dict):
                raise FlexmarlError(f"{path}, line {number}: no JSON object: {entry!r:.60}; remove that line")
            yield entry


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


FORMAT = 4
"""Format of the journal's lines. It rises when older readers can no longer read them. Format 1 had no first line."""
_FIRST = "journal"
"""The first line's value of `event`, which is no event's name."""
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
E = TypeVar("E", bound=Event)


class Journal:
    """Writes the events of a run to a file. Secrets are masked (see safe_json.py).

    An existing file is continued; a torn last line is cut off first. Raises FlexmarlError if the file has another
    format.
    """

    def __init__(self, path: Path) -> None:
        check_format(path)
        self._file = append_lines(path)
        if not path.stat().st_size:
            self._file.write(_encode({"t": 0.0, "event": _FIRST, "format": FORMAT}) + "\n")

    def write(self, event: Event) -> None:
        """Writes one line."""
        self._file.write(_encode(to_json(event)) + "\n")

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        with suppress(OSError):  # A full disk already raised when the line was written.
            self._file.close()


class RememberedEvents(Events):
    """Events for tests: keeps every event as the line that a journal would have."""

    def __init__(self, clock: Callable[[], float] | None = lambda: 0.0) -> None:
        """All times are 0 by default. With `clock=None`, the event loop's time is used."""
        super().__init__(clock)
        self._lines: list[str] = []
        self.listen(Event, lambda event: self._lines.append(_encode(to_json(event))))

    def of(self, *kinds: type[E]) -> list[E]:
        """The events of these types that were emitted so far."""
        lines = [json.loads(line) for line in self._lines]
        return [_read(line) for line in lines if issubclass(CATALOGUE[line["event"]], kinds)]

    @property
    def all(self) -> list[Event]:
        """All events that were emitted so far."""
        return self.of(Event)

    def save(self, path: Path) -> None:
        """Writes all events to a journal at `path`."""
        journal = Journal(path)
        for event in self.all:
            journal.write(event)
        journal.close()


def read_journal(path: Path) -> Iterator[Event]:
    """Yields the events of a journal in order, without a torn last line.

    Raises FlexmarlError if the journal has another format, or if a line is no event of this version.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if number == 1:
            _check_first(path, line)
            continue
        try:
            yield _read(line)
        except (ValueError, TypeError) as error:
            raise FlexmarlError(f"{path}, line {number}: {error}; remove that line") from error


def check_format(path: Path) -> None:
    """Raises FlexmarlError if the journal has another format than FORMAT.

    A journal that does not exist or has no line is accepted.
    """
    first = next(read_lines(path), None) if path.exists() else None
    if first is not None:
        _check_first(path, first)


def _check_first(path: Path, line: dict[str, Any]) -> None:
    found = line.get("format") if line.get("event") == _FIRST else 1
    if found != FORMAT:
        raise FlexmarlError(
            f"{path} is a journal of format {found}, and this version of flexmarl reads format {FORMAT}: use the "
            "version that wrote the run, or begin a new run"
        )


def _read(line: dict[str, Any]) -> Any:
    kind = CATALOGUE.get(line.get("event", ""))
    if kind is None:
        raise ValueError(f"{line.get('event')!r} is no event of this version")
    return from_json(kind, line)


def read_run(path: Path) -> Iterator[Event]:
    """Yields the events of all commands on one clock. The times of a command continue those of the one before.

    Each event has the number of its `command`, from 1. A command begins with `RunStarted`, or where the time goes back:
    a command may emit events about an earlier command before its own `RunStarted`.
    """
    command, offset, latest, previous, started = 1, 0.0, 0.0, 0.0, False
    for event in read_journal(path):
        is_start = isinstance(event, RunStarted)
        if event.t < previous or (is_start and started):
            command, offset, started = command + 1, latest, False
        started, previous = started or is_start, event.t
        moved = event.later(offset, command) if command > 1 else event
        latest = max(latest, moved.t)
        yield moved
