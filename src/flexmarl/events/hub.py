"""Decides who hears of an event: everybody who listens to its type, or to a type above it.

    events.listen(Called, demand.answered)
    events.emit(Called(...))                 part ──► events ──► journal, monitor, balance

Listeners are called at once, in the event loop, in the midst of what the emitting part does: they must be quick. All
hear of events in the same order; which of them hears first is not to matter to them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from flexmarl.events.event import Event

E = TypeVar("E", bound=Event)
Hear = Callable[[Any], None]


class Events:
    """Where the parts of a run say what happened. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives the run's seconds; without one they are the event loop's."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._listeners: list[tuple[type[Event], Hear]] = []
        self._hearing: dict[type[Event], list[Hear]] = {}
        self._unheard: deque[Event] = deque()

    def now(self) -> float:
        """The moment on the run's clock."""
        return self._clock()

    def moment(self, loop_time: float) -> float:
        """A moment of the event loop's clock, on the run's."""
        return loop_time + (self._clock() - asyncio.get_running_loop().time())

    def listen(self, kind: type[E], hear: Callable[[E], None]) -> None:
        """From now on every event of the type is heard, with its time."""
        self._listeners.append((kind, hear))
        self._hearing.clear()

    def emit(self, event: Event) -> None:
        """It happened now: whoever listens hears of it."""
        self._unheard.append(event.at(self._clock()))
        if len(self._unheard) > 1:  # A listener emitted it: all hear of it after what made the listener do so.
            return
        try:
            while self._unheard:
                happened = self._unheard[0]
                for hear in self._hearing_of(type(happened)):
                    hear(happened)
                self._unheard.popleft()
        finally:
            self._unheard.clear()

    def _hearing_of(self, kind: type[Event]) -> list[Hear]:
        if kind not in self._hearing:
            self._hearing[kind] = [hear for wanted, hear in self._listeners if issubclass(kind, wanted)]
        return self._hearing[kind]
