"""Decides what follows from the graph of an episode's calls: how long it takes at best, and what depends on what."""

from collections.abc import Callable, Mapping, Sequence

from flexmarl.credit.interface import Call


def longest_path(calls: Sequence[Call], cost: Callable[[Call], float]) -> float:
    """The largest sum of costs along calls that wait for one another. `calls` in hop order.

    >>> longest_path([Call(hop=0), Call(hop=1, after=(0,)), Call(hop=2, after=(0,))], lambda call: call.hop + 1.0)
    4.0
    """
    ends: dict[int, float] = {}
    for call in calls:
        ends[call.hop] = cost(call) + max((ends[hop] for hop in call.after), default=0.0)
    return max(ends.values(), default=0.0)


def descendants(calls: Sequence[Call]) -> Mapping[int, frozenset[int]]:
    """For each hop, the hops of the calls that depend on it, directly or not. `calls` in hop order."""
    found: dict[int, set[int]] = {call.hop: set() for call in calls}
    for call in reversed(calls):  # All that depends on it has been seen.
        for hop in call.after:
            found[hop] |= {call.hop, *found[call.hop]}
    return {hop: frozenset(later) for hop, later in found.items()}
