"""Decides when a policy gets a further instance, where the rollout pool has free room, and which of them goes first.

    growth        one more instance for the policy that drains last, if that pays within its own drain time
    first_to_go   the grown instance that is retired where room is missed

A policy with `n` instances and `w` seconds of work for one instance drains in `w / n`. One more, which serves from
`start_s` on, makes that `(w + start_s) / (n + 1)`: less exactly if it serves before the queue is drained. No other
policy gives anything for it, so unlike a move it need not make up for the time until it serves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flexmarl.inference.scaling import Loads, drain_s, last_to_drain
from flexmarl.records import InstanceId, PolicyName

LEAST_GAIN = 0.05
"""Least share of the drain time that a new instance must save, as for moves: less is chance."""


GROW = "grow"
"""Name of this rule in the journal's `balance_decided`."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The decision that a policy gets one more instance, and why."""

    policy: PolicyName
    because: str


def growth(loads: Loads, *, room: Collection[PolicyName], least_gain: float = LEAST_GAIN) -> Growth | None:
    """The policy that gets one more instance now, if any. `room` has the policies whose instances have room.

    >>> from flexmarl.inference.scaling import Expectation, PolicyLoad
    >>> waits = Expectation(tokens=100.0, tokens_left=50.0, tokens_per_s=10.0)
    >>> load = PolicyLoad(instances={InstanceId("solver", 0): 1}, waiting=8, expected=waits, start_s=10.0)
    >>> growth({"solver": load}, room={"solver"}).because
    "'solver' drains last, in 85.0 s; with an instance that serves from 10.0 s on, in 47.5 s"
    """
    known = {policy: load for policy, load in loads.items() if load.expected is not None}
    drains = {policy: drain_s(load) for policy, load in known.items()}
    policy = last_to_drain(known, drains)
    if policy is None or policy not in room:
        return None
    before, start_s = drains[policy], known[policy].start_s
    after = drain_s(known[policy], more=1, missed_s=start_s)
    if before <= start_s or before - after <= least_gain * before:
        return None
    return Growth(
        policy,
        f"'{policy}' drains last, in {before:.1f} s; with an instance that serves from {start_s:.1f} s on, "
        f"in {after:.1f} s",
    )


def first_to_go(grown: Mapping[InstanceId, int], waiting: Mapping[PolicyName, int]) -> InstanceId | None:
    """The grown instance whose end is missed least: of the policy with the fewest waiting requests, the idlest one.

    `grown` has those that may go, with the number of requests that each runs.
    """
    return min(grown, key=lambda name: (waiting.get(name.policy, 0), grown[name], name), default=None)
