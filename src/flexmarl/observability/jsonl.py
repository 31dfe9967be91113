"""JSON Lines on disk, appended to by one process that may be killed at any moment.

A line counts when its newline is there: each is written at once, a reader passes over an unfinished last line, and
whoever continues the file cuts it off first.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from flexmarl.errors import FlexmarlError
from flexmarl.observability.strict_json import parse_json


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
