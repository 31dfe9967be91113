"""Journal on a JSON Lines file: every event and every decision of a run, with its reason.

    journal.event("group_admitted", group=3, step=1, because="2 of 4 slots free")

writes `{"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1}`: one line, one write, so
that a killed process loses at most the line it was writing (see jsonl.py).
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flexmarl.observability.jsonl import append_lines, read_lines
from flexmarl.observability.plain import plain

_RESERVED = frozenset({"t", "event"})
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

    def event(self, event: str, /, *, because: str = "", **fields: Any) -> None:
        """Writes one line: what happened, why (wherever somebody decided), and the event's own fields."""
        entry: dict[str, Any] = {"t": round(self._clock(), 6), "event": event}
        if because:
            entry["because"] = plain(because)
        for name in _RESERVED & fields.keys():
            raise ValueError(f"journal field {name!r} of event {event!r} is the journal's own; give it another name")
        line = _encode(entry | plain(fields))
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
            self._file.close()


class MemoryJournal(Journal):
    """Journal for tests: in memory, and timeless unless a clock is given."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(None, clock)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a journal in order, without a torn last line."""
    return read_lines(path)
