"""JSON Lines on disk, appended to by one process that may be killed at any moment.

A line counts when its newline is there: each is written at once, a reader passes over an unfinished last line, and
whoever continues the file cuts it off first.

Journal on a JSON Lines file: every event and every decision of a run, with its reason.

    journal.event("group_admitted", group=3, step=1, because="2 of 4 slots free")

writes `{"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1}`: one line, one write, so
that a killed process loses at most the line it was writing (see jsonl.py). Nothing is held back: of the 9 us that the
event of a call takes, its write is one and a half.

What took time also says when it began, by `journal.now()`, and in which process of the run; the timeline shows it:

    journal.event("updated", process="trainer/solver", began=began, version=4)

`t` is its end, or `ended` where that was earlier.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from flexmarl.errors import FlexmarlError
from flexmarl.events.safe_json import parse_json, plain


def append_lines(path: Path) -> TextIO:
    """Opens the file for more lines, made or continued; each goes to the file when its newline is written."""
    if path.exists():
        _cut_torn_line(path)
    return path.open("a", buffering=1, encoding="ascii", newline="\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects in order, without a torn last line. Any other unreadable line is an error that names it."""
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


START = "run_started"
"""An event of each command that works on a run; the first, but for what it found when it began."""
TIMES = ("t", "began", "ended")
"""Fields that are moments; all by the clock of their command."""
_RESERVED = ("t", "event", "command")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Journal:
    """Where loops say what happened and why. It only listens: nothing reads it back during a run.

    Called from one event loop; `t` is that loop's time. Secrets are masked (see secrets.py). An existing file is
    continued, after its torn last line, if it has one, has been cut off.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        """With path None the journal stays in memory."""
        self._path = path
        self._clock = clock
        self._lines: list[str] = []
        self._file = None if path is None else append_lines(path)

    def now(self) -> float:
        """The moment by the journal's clock: what `began` and `ended` of an event are."""
        return round(self._clock(), 6)

    def moment(self, loop_time: float) -> float:
        """A moment of the running event loop's clock, by the journal's."""
        return round(self._clock() - (asyncio.get_running_loop().time() - loop_time), 6)

    def event(self, event: str, /, *, because: str = "", **fields: Any) -> None:
        """Writes one line: what happened, why (wherever somebody decided), and the event's own fields."""
        entry: dict[str, Any] = {"t": self.now(), "event": event}
        if because:
            entry["because"] = plain(because)
        for name in _RESERVED:
            if name in fields:
                raise ValueError(f"journal field {name!r} of event {event!r} is the journal's own; rename it")
        entry.update(plain(fields))
        line = _encode(entry)
        if self._file is None:
            self._lines.append(line)
        else:
            self._file.write(line + "\n")

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """What was written so far, or only the events of one name."""
        written = map(json.loads, self._lines) if self._path is None else read_journal(self._path)
        return [entry for entry in written if event is None or entry["event"] == event]

    def close(self) -> None:
        """Ends it; calling it twice is no error."""
        if self._file is not None:
            with suppress(OSError):  # What the disk does not take was an error when it was written.
                self._file.close()


class MemoryJournal(Journal):
    """Journal for tests: in memory, and timeless unless a clock is given."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(None, clock)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a journal in order, without a torn last line."""
    return read_lines(path)


def read_run(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of all commands on one clock: each command's goes on where the one before stopped.

    Each event says the number of its `command`, from 1. A command begins with `run_started`, or where the time goes
    back: before that event it may have said what it found of the command before.
    """
    command, offset, latest, previous, started = 1, 0.0, 0.0, 0.0, False
    for entry in read_journal(path):
        is_start = entry["event"] == START
        if entry["t"] < previous or (is_start and started):
            command, offset, started = command + 1, latest, False
        started, previous = started or is_start, entry["t"]
        for name in TIMES:
            if isinstance(entry.get(name), (int, float)):
                entry[name] = round(entry[name] + offset, 6)
        latest = max(latest, entry["t"])
        yield entry | {"command": command}
