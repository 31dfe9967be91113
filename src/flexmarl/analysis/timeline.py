"""Decides the timeline of a run from its journal, and writes it in Chrome's Trace Event Format.

Open timeline.json in ui.perfetto.dev:

    controller        counters; decisions as marks; a lane for the start, for steps, for rollout, for each other phase
    trainer/solver    a lane for micro-batches, one for updates
    engine/solver/0   as many lanes of calls as ran at once

An event that took time is a slice in the row of its process. Its other fields are the arguments of the slice. An event
that took no time is a mark if it gives a reason (a decision). Events are written as they are read, so the length of the
run does not matter. The names of rows and lanes are written last, when all processes are known.

Slices of one kind that overlap are drawn in several lanes, so that no slice hides another (`Lanes`):

    lane 1  ▐██ a ██▌      ▐██ d ██▌
    lane 2     ▐██ b ██▌
    lane 3        ▐██████ c ██████▌

Rows are sorted by name, numbers by value:

    >>> sorted(["level_10", "level_2"], key=natural)
    ['level_2', 'level_10']
"""

import itertools
import json
import re
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.events.event import Event, Timed, to_json
from flexmarl.events.group_events import GroupReady
from flexmarl.events.journal import read_run
from flexmarl.events.overlap import Interval
from flexmarl.events.run_events import ProcessStarted, RunStarted
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import QueueCounts
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.records import CONTROLLER, WorkerId


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers inside names by value."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


class Lanes:
    """Lanes for slices of one kind, filled by best fit.

    Slices may come in any order. A journal has them in the order of their ends; then there are no more lanes than
    slices that ran at the same time.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Number of lanes."""
        return len(self._ends)

    def place(self, began: int, ended: int) -> int:
        """Returns the number of the slice's lane, from 0.

        It is the lane that became free the shortest time before `began`, or a new one if no lane was free.
        """
        free = bisect_right(self._ends, (began, len(self._ends)))
        lane = self._ends.pop(free - 1)[1] if free else len(self._ends)
        insort(self._ends, (ended, lane))
        return lane


DECISIONS = "decisions"
"""Name of the controller's lane of marks."""
ORDER = ("controller", "trainer", "engine")
"""Order of rows from top to bottom, by the first part of a process's name. Others come last."""

TraceEvent = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_STANDARD_FIELDS = frozenset({"t", "event", "began", "ended"})


def render_timeline(run_dir: Path) -> Path:
    """Reads journal.jsonl of the run folder and writes timeline.json into it; returns its path."""
    folder = RunFolder(run_dir)
    with folder.timeline.open("w", encoding="ascii", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        comma = "\n"
        for event in trace_events(read_run(folder.journal)):
            file.write(comma + _encode(event))
            comma = ",\n"
        file.write("\n]}\n")
    return folder.timeline


def trace_events(events: Iterable[Event]) -> Iterator[TraceEvent]:
    """Yields the trace events of a journal's events, which are on one clock. Times are whole microseconds."""
    rows, untrained, commands = TimelineRows(), Untrained(), CommandTimes()
    for event in events:
        commands.follow(event)
        if start := commands.start(event):
            yield rows.span(CONTROLLER, "start", start, {})
        if isinstance(event, ProcessStarted):
            rows.started(event)
        if isinstance(event, Timed):
            yield rows.slice(event)
        elif event.because:
            yield rows.mark(event)
        for name, values in (*_queues(event), *untrained.after(event)):
            yield {"name": name, "ph": "C", "ts": _us(event.t), "pid": rows.controller, "tid": 0, "args": values}
    yield from rows.named()


class TimelineRows:
    """The processes of a trace and their lanes. Each has its own number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._processes: dict[WorkerId, int] = {}
        self._lanes: dict[tuple[WorkerId, str], Lanes] = {}
        self._threads: dict[tuple[WorkerId, str, int], int] = {}
        self._places: dict[WorkerId, list[str]] = {}
        self.controller = self._process(CONTROLLER)
        """Number of the controller's row."""

    def started(self, event: ProcessStarted) -> None:
        """Records where a process runs. A process that was replaced or started again by a resume has several places."""
        place = f"pid {event.pid} on {event.node}"
        places = self._places.setdefault(event.process, [])
        if place not in places:
            places.append(place)

    def slice(self, event: Timed) -> TraceEvent:
        """A complete event, from `began` to `ended`, in a free lane of its process. Times are microseconds."""
        return self.span(event.process, _name(event), (event.began, event.ended), _arguments(event))

    def span(self, process: WorkerId, name: str, interval: Interval, arguments: Mapping[str, Any]) -> TraceEvent:
        """A complete event in a free lane of its process. The interval is in seconds."""
        began, ended = map(_us, interval)
        lane = self._lanes.setdefault((process, name), Lanes()).place(began, ended)
        where = {"pid": self._process(process), "tid": self._thread(process, name, lane)}
        return {"name": name, "ph": "X", "ts": began, "dur": ended - began, **where, "args": dict(arguments)}

    def mark(self, event: Event) -> TraceEvent:
        """An instant event, on the decision row of the controller."""
        where = {"pid": self.controller, "tid": self._thread(CONTROLLER, DECISIONS, 0)}
        return {"name": _name(event), "ph": "i", "s": "t", "ts": _us(event.t), **where, "args": _arguments(event)}

    def named(self) -> Iterator[TraceEvent]:
        """Yields the names and the order of rows and lanes."""
        for name in self._places:
            self._process(name)
        for place, name in enumerate(sorted(self._processes, key=_order)):
            title = f"{name} ({', then '.join(self._places[name])})" if name in self._places else name
            yield _metadata("process_name", self._processes[name], 0, name=title)
            yield _metadata("process_sort_index", self._processes[name], 0, sort_index=place)
        lanes = sorted(self._threads, key=lambda lane: (lane[1] != DECISIONS, lane))
        for place, (process, name, lane) in enumerate(lanes):
            where = self._processes[process], self._threads[process, name, lane]
            yield _metadata("thread_name", *where, name=f"{name} {lane + 1}" if lane else name)
            yield _metadata("thread_sort_index", *where, sort_index=place)

    def _process(self, name: WorkerId) -> int:
        if name not in self._processes:
            self._processes[name] = next(self._numbers)
        return self._processes[name]

    def _thread(self, process: WorkerId, name: str, number: int) -> int:
        lane = (process, name, number)
        if lane not in self._threads:
            self._threads[lane] = next(self._numbers)
        return self._threads[lane]


@dataclass(slots=True)
class CommandTimes:
    """Follows the commands of a run through the events that `read_run` yields."""

    began: float = 0.0
    """The moment at which the present command began, which is the end of the one before it."""
    _number: int = 1
    _latest: float = 0.0

    def follow(self, event: Event) -> bool:
        """Takes the next event. Returns True if it is the first one of a later command."""
        begins = event.command != self._number
        if begins:
            self._number, self.began = event.command, self._latest
        self._latest = max(self._latest, event.t)
        return begins

    def start(self, event: Event) -> Interval | None:
        """Returns the start of the present command if the event ends it, and if it took any time.

        `RunStarted` ends it: then Ray, engines and trainers are ready.
        """
        return (self.began, event.t) if isinstance(event, RunStarted) and event.t > self.began else None


class Untrained:
    """Counts the rows of each policy that are READY and in no micro-batch that has ended."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()

    def after(self, event: Event) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yields the counts if the event changed them. A command starts after a step, with counts of 0."""
        match event:
            case GroupReady():
                self._rows.update(event.samples)
            case MicroBatchDone():
                self._rows[event.policy] -= event.rows
            case RunStarted():
                self._rows = Counter(dict.fromkeys(self._rows, 0))
            case _:
                return
        if self._rows:
            # A micro-batch may end before the last rows of its group are counted.
            yield "untrained rows", {policy: max(0, rows) for policy, rows in self._rows.items()}


def _queues(event: Event) -> Iterator[tuple[str, Mapping[Any, float]]]:
    """Yields counters of running and queued calls if the event counts the queues."""
    if isinstance(event, QueueCounts):
        yield "queued calls", event.queued
        yield "running calls", event.running
        yield "event loop lag (ms)", {"worst": event.lag_ms}


def _name(event: Event) -> str:
    return event.name.removesuffix("_ended")


def _arguments(event: Event) -> dict[str, Any]:
    return {name: value for name, value in to_json(event).items() if name not in _STANDARD_FIELDS}


def _metadata(kind: str, process: int, thread: int, **values: Any) -> TraceEvent:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": values}


def _order(process: WorkerId) -> tuple[int, list[tuple[int, str]]]:
    kind = process.kind
    return (ORDER.index(kind) if kind in ORDER else len(ORDER), natural(process))


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
