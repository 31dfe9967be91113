"""Sinks of metrics: what a sink is, and the one that every run has, a JSON Lines file with one line per flush."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flexmarl.observability.jsonl import append_lines, read_lines


class Sink(Protocol):
    """Where the values of each step go. Called from one event loop, once per flush; it must not block for long."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's values."""
        ...

    def close(self) -> None:
        """Writes out what it holds. Calling it twice is no error."""
        ...


class JsonlSink:
    """Sink on a JSON Lines file, e.g. `{"step":3,"team/success":0.61}`; a value that is not finite becomes null."""

    def __init__(self, path: Path) -> None:
        self._file = append_lines(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, separators=(",", ":"), allow_nan=False) + "\n")

    def close(self) -> None:
        """Ends it; calling it twice is no error."""
        self._file.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Values by step, in order of steps. A step that was written twice, after a resume say, has its newest values."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(path):
        step = int(line.pop("step"))
        steps.setdefault(step, {}).update({name: value for name, value in line.items() if value is not None})
    return dict(sorted(steps.items()))
