"""Decides when the requests of a continuous batch get their tokens, in segments, never token by token.

    now ──►  the step that is under way ends      settle
             requests join there, or leave         join, end_now
             nothing changes for n steps           next_end: from a closed form
             the first request has all its tokens  pop_ended

A segment is the steps between two changes: the batch is constant in it. A step of b requests that hold k tokens of keys
and values takes decode_s + decode_request_s b + decode_kv_s k, and adds b tokens, so n steps take

    first n + growth n (n - 1) / 2      with first = the first step, growth = decode_kv_s b

A request ends after `prefill_steps` plus its number of tokens, counted in steps of the batch from the step at which it
joined. A heap finds the next request to end, so every call here is O(log n) in the requests that decode.

Cores that engines and trainers share slow each other down: `CpuShare` counts the busy ones.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from flexmarl.analysis.costs import EngineCosts, SharedHost


class CpuShare:
    """The shared cores of one simulated machine.

    >>> host = CpuShare(SharedHost(engine_per_trainer=0.5))
    >>> with host.busy_trainer():
    ...     host.engine_factor()
    1.5
    """

    def __init__(self, shared: SharedHost | None = None) -> None:
        """Without `shared`, engines and trainers do not slow each other down."""
        self._shared = shared or SharedHost()
        self._slows = self._shared != SharedHost()
        self._engines: dict[Callable[[], None], None] = {}
        self._trainers = 0

    def engine_factor(self) -> float:
        """Returns how many times as long a busy engine's steps take as if it were alone."""
        others = max(0, len(self._engines) - 1)
        return 1.0 + self._shared.engine_per_trainer * self._trainers + self._shared.engine_per_engine * others

    def trainer_factor(self) -> float:
        """Returns how many times as long a busy trainer's work takes as if it were alone."""
        others = max(0, self._trainers - 1)
        return 1.0 + self._shared.trainer_per_engine * len(self._engines) + self._shared.trainer_per_trainer * others

    def engine_busy(self, on_change: Callable[[], None]) -> None:
        """Registers a busy engine. `on_change` is called whenever `engine_factor` has changed, until `engine_idle`."""
        with self._changing():
            self._engines[on_change] = None

    def engine_idle(self, on_change: Callable[[], None]) -> None:
        """Removes the engine that registered this `on_change`. Does nothing if there is none."""
        with self._changing():
            self._engines.pop(on_change, None)

    @contextmanager
    def busy_trainer(self) -> Iterator[None]:
        """Counts one more busy trainer inside the block."""
        with self._changing():
            self._trainers += 1
        try:
            yield
        finally:
            with self._changing():
                self._trainers -= 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if not self._slows:
            yield
            return
        before = self.engine_factor()
        yield
        if self.engine_factor() != before:
            for on_change in list(self._engines):
                on_change()


T = TypeVar("T")


class Segment(NamedTuple):
    """Consecutive decode steps of an unchanged batch."""

    start: float
    first_s: float
    """Duration of the first step."""
    growth_s: float = 0.0
    """Each step takes this much longer than the step before it."""

    def instant(self, steps: int) -> float:
        """Returns the time at which `steps` steps are done.

        >>> Segment(10.0, first_s=1.0, growth_s=0.5).instant(3)
        14.5
        """
        return self.start + steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_until(self, now: float, most: int) -> int:
        """Returns the number of steps up to the first token boundary at or after `now`, at most `most`.

        >>> Segment(10.0, first_s=1.0, growth_s=0.5).steps_until(12.6, most=9)
        3
        """
        if now <= self.start:
            return 0
        # The root of instant(n) = now, in the form that loses no digits when growth is small.
        slope, late = self.first_s - self.growth_s / 2, now - self.start
        root = slope + math.sqrt(slope * slope + 2 * self.growth_s * late)
        steps = math.ceil(min(most, 2 * late / root)) if root else most
        # The root is rounded, boundaries are exact: a request that arrives exactly at a boundary must join there.
        while steps > 0 and self.instant(steps - 1) >= now:
            steps -= 1
        while steps < most and self.instant(steps) < now:
            steps += 1
        return steps


@dataclass(slots=True, eq=False)
class BatchedRequest(Generic[T]):
    """A request in the batch."""

    item: T
    joined: int
    """The batch's step count when the request joined."""
    first: float
    """The step count at which its prefill is over: the next step samples its first token."""
    end: float
    """The step count at which it has all its tokens, or was ended early."""
    prompt_tokens: int

    def sampled_at(self, steps: int) -> int:
        """Returns how many tokens the request has when the batch has done `steps` steps."""
        return max(0, math.floor(min(steps, self.end) - self.first))


class Batch(Generic[T]):
    """The requests that decode together. The times passed to its methods must not decrease."""

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.steps = 0
        """Decode steps since the batch was made, up to the last settled boundary."""
        self.slowness = 1.0
        """Factor on all costs."""
        self._size = 0
        self._kv_tokens = 0
        self._boundary = 0.0
        """Time at which step number `steps` is done; in the future while that step runs or prompts are computed."""
        self._ends: list[tuple[float, int, BatchedRequest[T]]] = []
        self._serial = 0

    def __len__(self) -> int:
        return self._size

    @property
    def step_s(self) -> float:
        """Seconds that the next decode step takes, after the last settled one."""
        return self._segment().first_s

    @property
    def ending(self) -> bool:
        """True if a request ends with the current step."""
        return bool(self._size) and self._steps_left() == 0

    @property
    def next_end(self) -> float:
        """Time at which the next request ends if nothing changes; infinite if the batch is empty."""
        return self._segment().instant(self._steps_left()) if self._size else math.inf

    def next_boundary(self, now: float) -> float:
        """Time of the first token boundary after `now`; infinite if the batch is empty or stopped, or takes no time."""
        if not self._size:
            return math.inf
        segment = self._segment()
        steps = segment.steps_until(now, most=self._steps_left())
        return next((when for more in (0, 1) if (when := segment.instant(steps + more)) > now), math.inf)

    def steps_at(self, now: float) -> int:
        """Returns the decode steps since the batch was made, including the step in progress at `now`."""
        return self.steps + (self._segment().steps_until(now, most=self._steps_left()) if self._size else 0)

    def settle(self, now: float) -> None:
        """Ends the segment with the step in progress at `now`: changes take effect at the end of that step."""
        if not self._size:
            self._boundary = max(self._boundary, now)
        elif now > self._boundary:
            self._go(self._segment().steps_until(now, most=self._steps_left()))

    def join(self, item: T, *, tokens: int, prompt_tokens: int, prefill_tokens: int) -> BatchedRequest[T]:
        """Adds a request at the settled boundary. Decoding pauses while `prefill_tokens` are computed."""
        first = self.steps + self.costs.prefill_steps
        place = BatchedRequest(item, joined=self.steps, first=first, end=first + tokens, prompt_tokens=prompt_tokens)
        self._boundary += prefill_tokens * self.costs.prefill_token_s * self.slowness
        self._size += 1
        self._kv_tokens += prompt_tokens
        self._push(place)
        return place

    def end_now(self, place: BatchedRequest[T]) -> bool:
        """Ends a request early, at the settled boundary. Returns False if it ends there anyway."""
        if place.end <= self.steps:
            return False
        place.end = self.steps
        self._push(place)
        return True

    def go_to_next_end(self) -> None:
        """Advances to `next_end` at that time. If steps take no time, does only one, so that other tasks get a turn."""
        left = self._steps_left()
        self._go(left if self.step_s else min(left, 1))

    def pop_ended(self) -> list[BatchedRequest[T]]:
        """Removes and returns the requests that have ended at the settled boundary, in the order of their ends."""
        ended: list[BatchedRequest[T]] = []
        while self._size and self._head().end <= self.steps:
            place = heapq.heappop(self._ends)[-1]
            ended.append(place)
            self._size -= 1
            self._kv_tokens -= place.prompt_tokens + self.steps - place.joined
        return ended

    def stop(self, now: float) -> None:
        """Pauses decoding at the next boundary, until `resume`."""
        self.settle(now)
        self._boundary = math.inf

    def resume(self, now: float) -> None:
        """Continues decoding."""
        self._boundary = now

    def _go(self, steps: int) -> None:
        self._boundary = self._segment().instant(steps)
        self.steps += steps
        self._kv_tokens += steps * self._size

    def _segment(self) -> Segment:
        costs = self.costs
        first = costs.decode_s + costs.decode_request_s * self._size + costs.decode_kv_s * self._kv_tokens
        return Segment(self._boundary, first * self.slowness, costs.decode_kv_s * self._size * self.slowness)

    def _steps_left(self) -> int:
        return math.ceil(self._head().end - self.steps)

    def _head(self) -> BatchedRequest[T]:
        # Lazy deletion: a request that ended early was pushed again with its new end. Skip its stale entry.
        while self._ends[0][0] != self._ends[0][-1].end:
            heapq.heappop(self._ends)
        return self._ends[0][-1]

    def _push(self, place: BatchedRequest[T]) -> None:
        heapq.heappush(self._ends, (place.end, self._serial, place))
        self._serial += 1
