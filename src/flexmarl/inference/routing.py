"""Decides which instance serves a request."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexmarl.errors import EngineError
from flexmarl.records import InstanceId

_REMEMBERED = 65_536
"""Maximum number of conversations whose instance is remembered. The one used longest ago is forgotten first."""


SPARE = 1.0
"""A conversation leaves its instance if that has a mean load more to do than another one. With less patience, chance
imbalances of a few calls move whole conversations, and their prompts are computed again."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen instance, and why."""

    instance: InstanceId
    because: str


@dataclass(slots=True)
class Load:
    """The requests that were placed on an instance and are not done."""

    tokens: int = 0
    """Sum of the requests' `max_tokens`."""
    requests: int = 0
    """Number of requests."""
    ticket: int = 0
    """Serial number of the last choice of this instance. Of equal instances, the lowest ticket is next."""


@dataclass(frozen=True, slots=True)
class Routing:
    """An order of instances: the one with the least measure is chosen. Equal instances take turns."""

    measure: Callable[[Load], int]
    because: str
    """The reason for a choice; `{measure}` is replaced by the measure."""
    keeps_prefix: bool = False
    """True if a conversation returns to its instance, which has its prefix, unless another one has less to do."""
    spare: float = 0.0
    """How much more than the least loaded one that instance may have to do, in mean loads of an instance."""


ROUTINGS: Mapping[str, Routing] = {
    "least_tokens": Routing(lambda load: load.tokens, "least work: {measure} tokens", keeps_prefix=True),
    "conversations": Routing(lambda load: load.tokens, "least work: {measure} tokens", keeps_prefix=True, spare=SPARE),
    "least_requests": Routing(lambda load: load.requests, "fewest requests: {measure}"),
    "round_robin": Routing(lambda load: 0, "its turn"),
}
"""The routing rules by name. `least_requests` is FlexMARL's min-heap on instance load (section 5.2)."""


class Router:
    """The load of each instance of a policy, and the order in which instances are chosen.

    The heap may hold stale entries, which are skipped. An entry is valid if it has the instance's present measure and
    ticket, and the instance has a free place.
    """

    def __init__(
        self, instances: Iterable[InstanceId], routing: str = "least_tokens", *, max_running: int | None = None
    ) -> None:
        """No instance gets more than `max_running` requests at a time; None means no bound."""
        self._routing = ROUTINGS[routing]
        self._max_running = max_running
        self._loads: dict[InstanceId, Load] = {}
        self._heap: list[tuple[int, int, InstanceId]] = []
        self._homes: OrderedDict[str, InstanceId] = OrderedDict()
        self._next_ticket = 0
        for instance in instances:
            self.add(instance)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """All instances that can be chosen, also those without a free place now."""
        return tuple(self._loads)

    @property
    def has_place(self) -> bool:
        """True if some instance has a free place."""
        return self._first() is not None

    def load(self, instance: InstanceId) -> Load:
        """Load of an instance."""
        return self._loads[instance]

    def add(self, instance: InstanceId) -> None:
        """Adds an instance without load."""
        self._loads[instance] = Load()
        self._take_ticket(instance)

    def remove(self, instance: InstanceId) -> None:
        """Removes an instance and its load. Unknown names are ignored."""
        self._loads.pop(instance, None)

    def place(self, tokens: int, conversation: str | None = None) -> Placement:
        """Chooses an instance and adds the request to its load. Raises EngineError if none has a free place."""
        chosen = self._choose(conversation, tokens)
        if conversation is not None and self._routing.keeps_prefix:
            self._remember(conversation, chosen.instance)
        load = self._loads[chosen.instance]
        load.tokens += tokens
        load.requests += 1
        self._take_ticket(chosen.instance)
        return chosen

    def finish(self, instance: InstanceId, tokens: int) -> None:
        """Takes a request off the load of its instance. Ignored if the instance was removed."""
        if instance in self._loads:
            load = self._loads[instance]
            load.tokens -= tokens
            load.requests -= 1
            self._push(instance)

    def _choose(self, conversation: str | None, tokens: int) -> Placement:
        first = self._first()
        if first is None:
            raise EngineError("no live instance has a place" if self._loads else "no live instance is left")
        least = self._measure(first)
        home = self._homes.get(conversation) if conversation is not None else None
        if home is not None and home in self._loads and self._can_take(home):
            if self._measure(home) <= least:
                return Placement(home, f"keeps the prefix of '{conversation}' and has no more work than others")
            if (spare := self._routing.spare) and self._measure(home) - least <= spare * self._mean(tokens):
                return Placement(home, f"keeps the prefix of '{conversation}' and has little more work than others")
        if len(self._loads) == 1:
            return Placement(first, "the only instance")
        return Placement(first, self._routing.because.format(measure=least))

    def _remember(self, conversation: str, instance: InstanceId) -> None:
        self._homes[conversation] = instance
        self._homes.move_to_end(conversation)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    def _mean(self, tokens: int) -> float:
        """The mean load of an instance, with a request of so many tokens."""
        return (sum(map(self._measure, self._loads)) + tokens) / len(self._loads)

    def _measure(self, instance: InstanceId) -> int:
        return self._routing.measure(self._loads[instance])

    def _can_take(self, instance: InstanceId) -> bool:
        return self._max_running is None or self._loads[instance].requests < self._max_running

    def _take_ticket(self, instance: InstanceId) -> None:
        self._loads[instance].ticket = self._next_ticket
        self._next_ticket += 1
        self._push(instance)

    def _push(self, instance: InstanceId) -> None:
        """Pushes the instance's present entry. A full instance is pushed again when it has finished a request."""
        if not self._can_take(instance):
            return
        if len(self._heap) > 8 * len(self._loads) + 64:
            self._heap = [self._entry(name) for name in self._loads if self._can_take(name)]
            heapq.heapify(self._heap)
            return
        heapq.heappush(self._heap, self._entry(instance))

    def _entry(self, instance: InstanceId) -> tuple[int, int, InstanceId]:
        return (self._measure(instance), self._loads[instance].ticket, instance)

    def _first(self) -> InstanceId | None:
        """The next instance with a free place; None if there is none."""
        while self._heap:
            instance = self._heap[0][2]
            if instance in self._loads and self._heap[0] == self._entry(instance) and self._can_take(instance):
                return instance
            heapq.heappop(self._heap)
        return None
