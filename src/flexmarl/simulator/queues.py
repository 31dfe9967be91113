"""Decides how many calls waited when, from the calls themselves: for journals of runs that nobody looked at.

call     asked ▕── waits in the pool ──▏ began ▕─ waits while its instance's slots are taken ─▏ ... ended
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from flexmarl.simulator.facts import Call, Look

LOOKS = 2000
"""At most: a picture shows no more, and a look has an entry for every policy."""


def looks_of(calls: Sequence[Call], slots: Mapping[str, int]) -> list[Look]:
    """The queues at evenly spaced moments, by policy; `slots` are those of its instances.

    >>> one = Call("a/0", "a", 2.0, 4.0, 5, 5, 9, 0, 0, "g0e0a0", waited=2.0)
    >>> [(look.at, look.running["a"], look.queued["a"]) for look in looks_of([one], {"a": 1})][:2]
    [(0.0, 0, 1), (2.0, 1, 0)]
    """
    changes = sorted(
        change
        for call in calls
        for change in (
            (call.began - call.waited, 0, call.policy, call.instance),
            (call.began, 1, call.policy, call.instance),
            (call.ended, 2, call.policy, call.instance),
        )
    )
    given = Counter[str]()
    running, queued = Counter[str](dict.fromkeys(slots, 0)), Counter[str](dict.fromkeys(slots, 0))
    apart = (changes[-1][0] - changes[0][0]) / LOOKS if changes else 0.0
    looks: list[Look] = []
    for place, (at, what, policy, instance) in enumerate(changes):
        busy = min(given[instance], slots[policy])
        beyond = given[instance] - busy
        given[instance] += (0, 1, -1)[what]
        now_busy = min(given[instance], slots[policy])
        running[policy] += now_busy - busy
        queued[policy] += (1, -1, 0)[what] + given[instance] - now_busy - beyond
        last = place + 1 == len(changes)
        if last or (changes[place + 1][0] > at and (not looks or changes[place + 1][0] - looks[-1].at > apart)):
            looks.append(Look(at, dict(running), dict(queued)))
    return looks
