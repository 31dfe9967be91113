"""Decides which instance serves a request."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from flexmarl.errors import EngineError

_REMEMBERED = 65_536
"""Conversations whose instance is known; the longest silent are forgotten."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The instance, and why."""

    instance: str
    because: str


class Router:
    """Queued work per instance, in tokens still to sample.

    Least work first; equals take turns; a conversation returns to its instance, where its prefix is, unless that one
    has more to do than another. The heap holds stale entries, which are skipped: an entry is true if it carries the
    instance's present load and ticket.
    """

    def __init__(self, instances: Iterable[str]) -> None:
        self._load: dict[str, int] = {}
        self._ticket: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._next_ticket = 0
        for instance in instances:
            self.add(instance)

    @property
    def instances(self) -> tuple[str, ...]:
        """Those that can be chosen."""
        return tuple(self._load)

    def load(self, instance: str) -> int:
        """Work placed there and not yet done."""
        return self._load[instance]

    def add(self, instance: str) -> None:
        """A new instance, with nothing to do."""
        self._load[instance] = 0
        self._take_ticket(instance)

    def remove(self, instance: str) -> None:
        """An instance that is gone, with its work; unknown names are no error."""
        self._load.pop(instance, None)
        self._ticket.pop(instance, None)

    def place(self, work: int, conversation: str | None = None) -> Placement:
        """Chooses an instance and books the work on it. Raises EngineError if there is none."""
        least = self._least_loaded()
        home = self._homes.get(conversation) if conversation is not None else None
        if home in self._load and self._load[home] <= self._load[least]:
            chosen = Placement(home, f"keeps the prefix of '{conversation}' and has no more work than others")
        elif self._load.keys() == {least}:
            chosen = Placement(least, "the only instance")
        else:
            chosen = Placement(least, f"least work: {self._load[least]} tokens")
        if conversation is not None:
            self._homes[conversation] = chosen.instance
            self._homes.move_to_end(conversation)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        self._load[chosen.instance] += work
        self._take_ticket(chosen.instance)
        return chosen

    def finish(self, instance: str, work: int) -> None:
        """Unbooks work; of an instance that is gone, nothing."""
        if instance in self._load:
            self._load[instance] -= work
            self._push(instance)

    def _take_ticket(self, instance: str) -> None:
        self._ticket[instance] = self._next_ticket
        self._next_ticket += 1
        self._push(instance)

    def _push(self, instance: str) -> None:
        if len(self._heap) > 8 * len(self._load) + 64:
            self._heap = [(self._load[name], self._ticket[name], name) for name in self._load]
            heapq.heapify(self._heap)
            return
        heapq.heappush(self._heap, (self._load[instance], self._ticket[instance], instance))

    def _least_loaded(self) -> str:
        while self._heap:
            load, ticket, instance = self._heap[0]
            if self._load.get(instance) == load and self._ticket[instance] == ticket:
                return instance
            heapq.heappop(self._heap)
        raise EngineError("no live instance is left")
