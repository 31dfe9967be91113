"""Decides how many devices were at work and how many calls waited at any time, from the calls of a journal.

Journals without a monitor have no `QueueCounts` events: `queue_counts_of` computes them from the calls.

call     asked ▕── waits in the pool ──▏ began ▕─ waits while its instance's slots are taken ─▏ ... ended
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flexmarl.events.overlap import Interval
from flexmarl.events.serving_events import Called, QueueCounts
from flexmarl.records import InstanceId

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class BusyCount:
    """Number of parties at work at any time. A party is an engine or a trainer, given by its busy intervals."""

    def __init__(self, parties: Iterable[Sequence[Interval]]) -> None:
        spans = [interval for busy in parties for interval in busy]
        moments = np.array([moment for span in spans for moment in span])
        changes = np.array([change for _ in spans for change in (1.0, -1.0)])
        order = np.argsort(moments, kind="stable")
        self._changes = moments[order]
        level = np.cumsum(changes[order])
        # The integral of the level up to each moment gives the mean over any span.
        self._area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self._changes))]) if len(spans) else level

    def mean(self, edges: Floats) -> Floats:
        """Mean number of parties at work between each edge and the next."""
        if not len(self._changes):
            return np.zeros(len(edges) - 1)
        return np.diff(np.interp(edges, self._changes, self._area)) / np.maximum(np.diff(edges), 1e-12)

    def during(self, spans: Sequence[Interval]) -> Floats:
        """Mean number of parties at work within each span. Spans may overlap.

        >>> BusyCount([[(0.0, 2.0)], [(1.0, 2.0)]]).during([(0.0, 2.0), (1.0, 2.0)]).tolist()
        [1.5, 2.0]
        """
        return self.mean(np.array(spans).ravel())[::2]


def level(first: Indices, last: Indices, weights: Floats, segments: int) -> Floats:
    """Sum of the weights of the items present in each segment. Item i is present from `first[i]` up to `last[i]`."""
    ups = np.bincount(first, weights, minlength=segments + 1)
    downs = np.bincount(last, weights, minlength=segments + 1)
    return np.cumsum((ups - downs).astype(np.float64))[:segments]


MOST_COUNTS = 2000
"""Most counts of the queues in a run. A picture shows no more, and each one has an entry for every policy."""


def queue_counts_of(calls: Sequence[Called], slots: Mapping[str, int]) -> list[QueueCounts]:
    """The queues at up to about MOST_COUNTS moments at which they change. `slots` are those of an instance, by policy.

    >>> call = a_call("a/0", began=2.0, ended=4.0, waited_s=2.0)
    >>> [(one.t, one.running["a"], one.queued["a"]) for one in queue_counts_of([call], {"a": 1})][:2]
    [(0.0, 0, 1), (2.0, 1, 0)]
    """
    changes = sorted(
        change
        for call in calls
        for change in (
            (call.began - call.waited_s, 0, call.policy, call.instance),
            (call.began, 1, call.policy, call.instance),
            (call.ended, 2, call.policy, call.instance),
        )
    )
    given = Counter[InstanceId]()
    running, queued = Counter[str](dict.fromkeys(slots, 0)), Counter[str](dict.fromkeys(slots, 0))
    apart = (changes[-1][0] - changes[0][0]) / MOST_COUNTS if changes else 0.0
    counts: list[QueueCounts] = []
    for place, (at, what, policy, instance) in enumerate(changes):
        busy = min(given[instance], slots[policy])
        beyond = given[instance] - busy
        given[instance] += (0, 1, -1)[what]
        now_busy = min(given[instance], slots[policy])
        running[policy] += now_busy - busy
        queued[policy] += (1, -1, 0)[what] + given[instance] - now_busy - beyond
        last = place + 1 == len(changes)
        if last or (changes[place + 1][0] > at and (not counts or changes[place + 1][0] - counts[-1].t > apart)):
            counts.append(QueueCounts(t=at, running=dict(running), queued=dict(queued), lag_ms=0.0))
    return counts
