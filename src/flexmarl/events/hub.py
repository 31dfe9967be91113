"""Hub of a run's events: an event reaches all that listen to its type, or to a base class of its type.

    events.listen(Called, demand.answered)
    events.emit(Called(...))                 part ──► events ──► journal, monitor, balance

`emit` calls the listeners itself, so they must be quick. All listeners get the events in the same order. A listener
must not depend on being called before or after another one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from flexmarl.events.event import Event

E = TypeVar("E", bound=Event)
Hear = Callable[[Any], None]


class Events:
    """Passes the events that parts of a run emit to the listeners. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives the run's time in seconds. Without it, the event loop's time is used."""
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._listeners: list[tuple[type[Event], Hear]] = []
        self._hearing: dict[type[Event], list[Hear]] = {}
        self._unheard: deque[Event] = deque()

    def now(self) -> float:
        """The present moment on the run's clock."""
        return self._clock()

    def moment(self, loop_time: float) -> float:
        """Converts a moment of the event loop's clock into one of the run's clock."""
        return loop_time + (self._clock() - asyncio.get_running_loop().time())

    def listen(self, kind: type[E], hear: Callable[[E], None]) -> None:
        """Calls `hear` from now on with every event of type `kind`. The event has its time."""
        self._listeners.append((kind, hear))
        self._hearing.clear()

    def emit(self, event: Event) -> None:
        """Sets the event's time to now and passes it to its listeners.

        An event that a listener emits is passed on after all listeners got the present one.
        """
        self._unheard.append(event.at(self._clock()))
        if len(self._unheard) > 1:  # A listener emitted it: the loop of the outer call passes it on.
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
