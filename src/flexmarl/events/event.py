"""Events of a run: what every event has (name, time, reason), how it is written as JSON and read back, who hears it.

    GroupAdmitted(group=3, step=1, task="add-3", because="2 of 4 slots free")
    {"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1,"task":"add-3"}

A field that has its default value is left out of the line. Moments are rounded to microseconds in the line.

`Events` is the hub of a run: an event reaches all that listen to its type, or to a base class of its type.

    events.listen(Called, demand.answered)
    events.emit(Called(...))                 part ──► events ──► journal, monitor, balance

What the journal does not hold is a `Notice` (notices.py): it has neither a name nor a time.

`emit` calls the listeners itself, so they must be quick. All listeners get the events in the same order. A listener
must not depend on being called before or after another one.
"""

import asyncio
import math
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from flexmarl.events.safe_json import plain
from flexmarl.records.ids import InstanceId, WorkerId

NOW = math.inf
"""Stands for the moment at which the event is emitted, which is not known yet."""
MOMENTS = ("t", "began", "ended")
"""Fields that are moments, in seconds on the run's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened in a run, for listeners only. An `Event` also has a line in the journal."""

    def happen(self, t: float) -> None:
        """Sets the time at which it is emitted. A notice does not keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Notice):
    """Something that happened in a run."""

    name: ClassVar[str] = ""
    """Name of the event in the journal."""

    t: float = NOW
    """When it happened, in seconds on the clock of its command."""
    command: int = 1
    """Number of the run's command that it belongs to, from 1. A resumed run has several. Not written to the line."""
    because: str = ""
    """The reason, if the event is a decision."""

    def happen(self, t: float) -> None:
        """Sets the time at which it is emitted: the one change of an event. Who makes an event emits it once."""
        object.__setattr__(self, "t", t)  # `replace` takes longer than all else that `emit` does.

    def later(self, seconds: float, command: int) -> Self:
        """Returns the event with `seconds` added to its times, as one of the command number `command`."""
        return replace(self, t=round(self.t + seconds, 6), command=command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Event):
    """Something that took time in one worker: a slice of the timeline."""

    process: WorkerId
    """The worker whose time it took. Each worker has a row on the timeline."""
    began: float
    """When it began."""
    ended: float = NOW
    """When it ended. Left out of the line if equal to `t`."""

    @property
    def seconds(self) -> float:
        """Seconds that it took."""
        return self.ended - self.began

    def happen(self, t: float) -> None:
        """Sets the time at which it is emitted. It ends then at the latest, and begins no later than it ends."""
        Event.happen(self, t)
        object.__setattr__(self, "ended", min(self.ended, t))
        object.__setattr__(self, "began", min(self.began, self.ended))

    def later(self, seconds: float, command: int) -> Self:
        """Returns the event with `seconds` added to its times, as one of the command number `command`."""
        t, began, ended = (round(moment + seconds, 6) for moment in (self.t, self.began, self.ended))
        return replace(self, t=t, began=began, ended=ended, command=command)


def to_json(event: Event) -> dict[str, Any]:
    """Returns the event as a line of the journal."""
    line: dict[str, Any] = {"t": round(event.t, 6), "event": event.name}
    for name, default in _written(type(event)):
        value = getattr(event, name)
        if value != default:
            line[name] = round(value, 6) if name in MOMENTS else plain(value)
    if line.get("ended") == line["t"]:
        del line["ended"]
    return line


def from_json(kind: type[Event], line: Mapping[str, Any]) -> Event:
    """Returns the event of type `kind` that a line holds. Raises ValueError if the line lacks a required field."""
    readers = _readers(kind)
    if lacking := [name for name, (_, needed) in readers.items() if needed and name not in line]:
        raise ValueError(f"event '{kind.name}' lacks {', '.join(lacking)}")
    values = {name: read(line[name]) for name, (read, _) in readers.items() if name in line}
    event = kind(**values)
    event.happen(values["t"])
    return event


@cache
def _written(kind: type[Event]) -> list[tuple[str, Any]]:
    """The fields of a line other than `t`, in order, each with the default value at which it is left out."""
    return [(field.name, field.default) for field in fields(kind) if field.name not in ("t", "command")]


@cache
def _readers(kind: type[Event]) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """By field, the function that makes its value from JSON, and True if a line must have the field."""
    hints = get_type_hints(kind)
    own = [field for field in fields(kind) if field.name != "command"]
    return {field.name: (_reader(hints[field.name]), field.default is MISSING or field.name == "t") for field in own}


def _reader(kind: Any) -> Callable[[Any], Any]:
    kind = getattr(kind, "__supertype__", kind)
    if get_origin(kind) in (Union, types.UnionType):
        inner = _reader(next(one for one in get_args(kind) if one is not type(None)))
        return lambda value: None if value is None else inner(value)
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return lambda value: tuple(map(item, value))
    if kind in (InstanceId, WorkerId):
        return kind.parse
    if kind is float or (isinstance(kind, type) and issubclass(kind, Enum)):
        return kind
    return lambda value: value


N = TypeVar("N", bound=Notice)
Listener = Callable[[Any], None]


class Events:
    """Passes the events that parts of a run emit to the listeners. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives the run's time in seconds. Without it, the event loop's time is used."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._listeners: list[tuple[type[Notice], Listener]] = []
        self._listeners_by_kind: dict[type[Notice], list[Listener]] = {}
        self._pending: deque[Notice] = deque()

    def now(self) -> float:
        """The present moment on the run's clock."""
        return self._clock()

    def moment(self, loop_time: float) -> float:
        """Converts a moment of the event loop's clock into one of the run's clock."""
        return loop_time + (self._clock() - asyncio.get_running_loop().time())

    def listen(self, kind: type[N], listener: Callable[[N], None]) -> None:
        """Calls `listener` from now on with every event of type `kind`. The event has its time."""
        self._listeners.append((kind, listener))
        self._listeners_by_kind.clear()

    def emit(self, event: Notice) -> None:
        """Sets the event's time to now and passes it to its listeners.

        An event that a listener emits is passed on after all listeners got the present one.
        """
        event.happen(self._clock())
        self._pending.append(event)
        if len(self._pending) > 1:  # A listener emitted it: the loop of the outer call passes it on.
            return
        try:
            while self._pending:
                happened = self._pending[0]
                for listener in self._listeners_of(type(happened)):
                    listener(happened)
                self._pending.popleft()
        finally:
            self._pending.clear()

    def _listeners_of(self, kind: type[Notice]) -> list[Listener]:
        if kind not in self._listeners_by_kind:
            self._listeners_by_kind[kind] = [listener for of, listener in self._listeners if issubclass(kind, of)]
        return self._listeners_by_kind[kind]
