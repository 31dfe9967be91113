"""Metrics of a run by step: counters, means and gauges, and the sinks that they are written to at the end of each step.

Every run has one sink, a JSON Lines file with a line per step; there may be others.

Names are paths, such as `reward/{agent}`. Curves, tables and the live screen select metrics by the first part of the
name. docs/howto/metrics.md lists every name with its unit and meaning; a test compares the page with real runs.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flexmarl.events.journal import append_lines, read_lines


class Sink(Protocol):
    """Receives the values of each step. Called from one event loop, once per flush; it must not block for long."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one step's values."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Writes out the values that it still holds. `failed`: an error ended the run. A second call does nothing."""
        ...


class JsonlSink:
    """Sink on a JSON Lines file, e.g. `{"step":3,"team/success":0.61}`. A value that is not finite becomes null."""

    def __init__(self, path: Path) -> None:
        self._file = append_lines(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, separators=(",", ":"), allow_nan=False) + "\n")

    def close(self, *, failed: bool = False) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Values by step, in order of steps. A step that was written twice, e.g. after a resume, has its newest values."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(path):
        step = int(line.pop("step"))
        steps.setdefault(step, {}).update({name: value for name, value in line.items() if value is not None})
    return dict(sorted(steps.items()))


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class _Phase:
    inside: int = 0
    since: float = 0.0


class Metrics:
    """Collects metrics between two flushes. Called from one event loop. `clock` gives the time in seconds."""

    def __init__(self, clock: Callable[[], float], sinks: Sequence[Sink] = ()) -> None:
        self._clock = clock
        self._sinks = tuple(sinks)
        self._kinds: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self._means: dict[str, _Mean] = {}
        self._gauges: dict[str, float] = {}
        self._phases: dict[str, _Phase] = {}
        self._flushed_at = clock()

    def start(self) -> None:
        """Begins the first step now: the time before it is nobody's."""
        self._flushed_at = self._clock()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Adds to a counter. The step's value is the sum."""
        self._claim(name, "counter")
        self._sums[name] = self._sums.get(name, 0.0) + float(amount)

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds a value to a mean. The step's value is the weighted mean; it is absent if the step had no weight."""
        self._claim(name, "mean")
        mean = self._means.setdefault(name, _Mean())
        mean.total += float(value) * weight
        mean.weight += weight

    def gauge(self, name: str, value: float) -> None:
        """Sets a gauge. It keeps its value until it is set again, over any number of steps."""
        self._claim(name, "gauge")
        self._gauges[name] = float(value)

    def begin(self, phase: str) -> None:
        """Begins to time a phase as `time/{phase}_s`, until `end`.

        A phase that is begun several times at once counts once, so it never takes longer than the step. Different
        phases are independent. A phase that goes on at a flush is split between the two steps.
        """
        clocked = self._phases.setdefault(phase, _Phase())
        if clocked.inside == 0:
            clocked.since = self._clock()
        clocked.inside += 1

    def end(self, phase: str) -> None:
        """Ends a phase that was begun."""
        clocked = self._phases[phase]
        clocked.inside -= 1
        if clocked.inside == 0:
            self.add(f"time/{phase}_s", self._clock() - clocked.since)

    def flush(self, step: int) -> dict[str, float]:
        """Ends the step: writes its values to the sinks, returns them, and starts over."""
        now = self._clock()
        for name, phase in self._phases.items():
            if phase.inside:
                self.add(f"time/{name}_s", now - phase.since)
                phase.since = now
        self.add("time/step_s", now - self._flushed_at)
        means = {name: mean.total / mean.weight for name, mean in self._means.items() if mean.weight}
        values = dict(sorted({**self._sums, **means, **self._gauges}.items()))
        self._sums.clear()
        self._means.clear()
        self._flushed_at = now
        for sink in self._sinks:
            sink.write(step, values)
        return values

    def close(self, *, failed: bool = False) -> None:
        """Closes the sinks. `failed`: an error ended the run."""
        for sink in self._sinks:
            sink.close(failed=failed)

    def _claim(self, name: str, kind: str) -> None:
        first = self._kinds.setdefault(name, kind)
        if first != kind:
            raise ValueError(f"metric {name!r} is a {first} and was written as a {kind}; give one of them another name")


def time_shares(values: Mapping[str, float]) -> dict[str, float]:
    """Share of the step that each phase took, from the values that `flush` returned. Overlap makes the sum exceed 1.

    >>> time_shares({"time/step_s": 4.0, "time/rollout_s": 3.0, "time/train_s": 2.0})
    {'rollout': 0.75, 'train': 0.5}
    """
    step_s = values.get("time/step_s", 0.0)
    phases = {name[5:-2]: value for name, value in values.items() if name.startswith("time/") and name != "time/step_s"}
    return {phase: value / step_s for phase, value in phases.items()} if step_s > 0 else {}


def tokens_per_s(values: Mapping[str, float]) -> float:
    """Sampled tokens per second of the step, from the values that `flush` returned; 0 if nothing was sampled.

    The seconds of an evaluation do not count, unless rollout went on during it.

    >>> tokens_per_s({"rollout/tokens": 60.0, "time/step_s": 5.0, "time/rollout_s": 2.0, "time/evaluate_s": 2.0})
    20.0
    """
    step_s, evaluate_s = values.get("time/step_s", 0.0), values.get("time/evaluate_s", 0.0)
    seconds = max(step_s - evaluate_s, values.get("time/rollout_s", 0.0))
    return values.get("rollout/tokens", 0.0) / (seconds or 1.0)
