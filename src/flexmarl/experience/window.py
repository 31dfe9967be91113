"""Decides which finished group is consumed next: the oldest one inside a window (docs/math.md, section 9).

    ids      12      13      14      15      16      17
             plays   taken   done    plays   done    done        W = 4
             ^head           ^taken next             ^outside [12, 15]: waits for the head, as 16 does

W = 1 is strict first in, first out; without a window, any finished group may be taken. A group that ends without being
taken leaves a tombstone, so that the head can pass it. With steps in order, groups may overtake each other inside one
step, never across steps.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from flexmarl.errors import TransitionError
from flexmarl.records import GroupId


@dataclass(frozen=True, slots=True)
class Taken:
    """The finished group to consume next, and why."""

    group: GroupId
    because: str


@dataclass(slots=True)
class _Open:
    """A group that was submitted at time `at`, and neither taken nor ended."""

    at: float
    finished: bool = False


class Window:
    """The groups between admission and consumption. A call takes O(log n), amortised; with steps in order, O(P)."""

    def __init__(self, size: int | None, *, step: int | None = None) -> None:
        """`size` is W, counted in ids from the head on, including taken and ended groups; None means no window.

        `step` is P if steps are in order, each with the P oldest groups; None if steps need no order.
        """
        if size is not None and size < 1:
            raise ValueError(f"a window holds at least 1 group, got {size}; use 1 for strict order, None for no window")
        self._size = size
        self._step = step
        self._missing = 0
        """Number of groups that the current step still lacks; 0 if the next group taken begins a step."""
        self._open: OrderedDict[GroupId, _Open] = OrderedDict()
        self._finished: list[GroupId] = []
        """A heap of group ids. Groups that have ended since are skipped when they come up."""
        self._newest = GroupId(-1)

    def resize(self, size: int | None) -> None:
        """Changes W. A smaller window gives no group back."""
        self._size = size

    def __len__(self) -> int:
        """Number of groups that were submitted, and neither taken nor ended."""
        return len(self._open)

    @property
    def head(self) -> GroupId | None:
        """The oldest group that was neither taken nor ended."""
        return next(iter(self._open), None)

    @property
    def head_at(self) -> float | None:
        """The time at which the head was submitted; None without a head."""
        return None if self.head is None else self._open[self.head].at

    def submitted(self, group: GroupId, at: float) -> None:
        """Adds a group admitted at time `at`. Ids come in order. A resumed run submits its active groups again."""
        if group <= self._newest:
            raise TransitionError(f"group {group} is submitted after group {self._newest}; ids come in order, once")
        self._newest = group
        self._open[group] = _Open(at)

    def finished(self, group: GroupId) -> None:
        """Notes that all episodes of the group are terminal: it may be taken when its turn comes."""
        one = self._find(group)
        if one.finished:
            raise TransitionError(f"group {group} has finished before; a group finishes once")
        one.finished = True
        heapq.heappush(self._finished, group)

    def ended(self, group: GroupId) -> None:
        """Removes a group that failed, was filtered or expired: it will not be taken, and the head may pass it."""
        self._find(group)
        del self._open[group]

    def begin_step(self) -> None:
        """Begins a step: groups taken from now on go into it. After P groups the next step begins by itself."""
        self._missing = 0

    def lacks_one(self) -> None:
        """Notes that a group that was taken goes into no step: its step takes another one."""
        self._missing += 1

    def take(self) -> Taken | None:
        """Takes the oldest finished group inside the window. None if there is none; groups beyond the window wait."""
        group, head = self._oldest_finished(), self.head
        if group is None or head is None or not self._reaches(group, head):
            return None
        heapq.heappop(self._finished)
        del self._open[group]
        if self._step is not None:
            self._missing = (self._missing or self._step) - 1
        if group == head:
            return Taken(group, "it is the oldest")
        scope = "there is no window" if self._size is None else f"it is among {self._size} from there on"
        scope += "" if self._step is None else ", of the same step"
        return Taken(group, f"the oldest finished one; group {head} plays, and {scope}")

    def overdue(self, now: float, deadline_s: float) -> GroupId | None:
        """The head, if it was submitted more than `deadline_s` ago and no group may be taken before it; else None."""
        group, head = self._oldest_finished(), self.head
        if head is None or (group is not None and self._reaches(group, head)):
            return None
        return head if now - self._open[head].at > deadline_s else None

    def _reaches(self, group: GroupId, head: GroupId) -> bool:
        inside = self._size is None or group < head + self._size
        return inside and (self._step is None or group in islice(self._open, self._missing or self._step))

    def _oldest_finished(self) -> GroupId | None:
        while self._finished and self._finished[0] not in self._open:
            heapq.heappop(self._finished)
        return self._finished[0] if self._finished else None

    def _find(self, group: GroupId) -> _Open:
        if group not in self._open:
            raise TransitionError(f"group {group} is not in the window; open: {list(self._open) or 'none'}")
        return self._open[group]
