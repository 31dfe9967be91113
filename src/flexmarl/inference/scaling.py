"""Decides which instances move from one policy to another (FlexMARL section 5.2; docs/math.md, section 10).

    queue_gap          one instance per look, when waiting requests are further apart than the gap
    queue_gap_literal  as many as the queues differ, as the paper words it
    drain_time         one instance per look, when what is queued will be done clearly sooner

Every policy keeps an instance, whatever happens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flexmarl.inference.demand import Expectation
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoad:
    """One policy's queue and instances, at one look."""

    instances: Mapping[InstanceId, int] = field(default_factory=dict)
    """Its live instances, and how many requests each one runs."""
    waiting: int = 0
    """Requests that no instance runs, wherever they wait."""
    slots: int = 1
    """Requests that an instance runs at a time."""
    expected: Expectation | None = None
    """Of its requests; None: it has answered none yet."""

    @property
    def running(self) -> int:
        """Requests that its instances run."""
        return sum(self.instances.values())


@dataclass(frozen=True, slots=True)
class Move:
    """An instance leaves its policy for another one, and why."""

    instance: InstanceId
    to: PolicyName
    because: str


Loads = Mapping[PolicyName, PolicyLoad]
WORTH_MOVING = 1.05
"""How much more the busiest instances must have to do: the work of steps differs by as much by chance."""


class BalanceRule(Protocol):
    """Looks at all policies at once, now and then while a step plays."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """The moves to make now; `move_s` is what one takes."""
        ...


class Stay:
    """No instance ever moves."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """Nothing."""
        return ()


@dataclass(frozen=True, slots=True)
class QueueGap:
    """FlexMARL's rule: from the shortest queue of waiting requests to the longest, if more than `gap` apart."""

    gap: int
    literal: bool = False
    """As many instances as the queues differ, instead of one. It overshoots: the next look moves them back."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """Moves to the longest queue; what a move takes plays no part."""
        donors = [policy for policy in loads if len(loads[policy].instances) > 1]
        if not donors:
            return ()
        to = max(loads, key=lambda policy: (loads[policy].waiting, policy))
        donor = min(donors, key=lambda policy: (loads[policy].waiting, loads[policy].running, policy))
        difference = loads[to].waiting - loads[donor].waiting
        if difference <= self.gap:
            return ()
        count = min(difference, len(loads[donor].instances) - 1) if self.literal else 1
        because = (
            f"{loads[to].waiting} requests wait for '{to}' and {loads[donor].waiting} for '{donor}', "
            f"more than {self.gap} apart"
        )
        return [Move(instance, to, because) for instance in idlest(loads[donor])[:count]]


@dataclass(frozen=True, slots=True)
class DrainTime:
    """Ours: from the policy that can best spare an instance to the one that takes longest to drain, if that pays."""

    least_gain: float = 0.1
    """Of the longest drain time: estimates are no better, and a move back would need as much again."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """At most one move, the one that shortens the longest drain time most."""
        known = {policy: load for policy, load in loads.items() if load.expected is not None}
        needy = [policy for policy in known if known[policy].waiting]
        if not needy:
            return ()
        to = max(needy, key=lambda policy: (drain_s(known[policy]), policy))
        before = drain_s(known[to])
        if before <= 2 * move_s:
            # An instance stands still for move_s, and makes up for that in as long again. The step lasts no less than
            # the longest drain time: beyond this, the move has paid before its end.
            return ()
        after_to = drain_s(known[to], more=1, from_s=move_s)
        best: tuple[float, PolicyName] | None = None
        for donor in known:
            if donor == to or len(known[donor].instances) < 2:
                continue
            if drain_s(without(known[donor], idlest(known[donor])[0])) >= before:
                continue  # The next look would find the donor overloaded, and move the instance back.
            after = max(after_to, drain_s(known[donor], more=-1))
            best = min(best or (after, donor), (after, donor))
        if best is None or before - best[0] <= self.least_gain * before:
            return ()
        after, donor = best
        because = f"'{to}' drains in {before:.1f} s; with one instance of '{donor}' both will have in {after:.1f} s"
        return [Move(idlest(known[donor])[0], to, because)]


def without(load: PolicyLoad, instance: InstanceId) -> PolicyLoad:
    """The same queue as the next look will see it once the instance has left: what it ran waits again."""
    left = {name: running for name, running in load.instances.items() if name != instance}
    return replace(load, instances=left, waiting=load.waiting + load.instances[instance])


def drain_s(load: PolicyLoad, *, more: int = 0, from_s: float = 0.0) -> float:
    """Seconds until what is queued is done, with `more` instances than now, the new ones `from_s` seconds from now.

    What is queued, in tokens, over what all instances sample in a second; but no sooner than a request takes alone.
    The expectation must be known.
    """
    expected = load.expected
    assert expected is not None
    queued_tokens = load.waiting * expected.tokens + load.running * expected.tokens_left
    if not queued_tokens:
        return 0.0
    rate = load.slots * expected.tokens_per_s
    latency_s = (expected.tokens if load.waiting else expected.tokens_left) / expected.tokens_per_s
    count = len(load.instances)
    if not count + more:
        return float("inf")
    if more > 0:
        return max((queued_tokens / rate + more * from_s) / (count + more), latency_s)
    return max(queued_tokens / rate / (count + more), latency_s)


def start_moves(work: Mapping[PolicyName, float], loads: Loads) -> Sequence[Move]:
    """Moves to the allocation whose busiest instances have least to do, if each step asks for `work` of the policies.

    `work` is in seconds of serving; every policy keeps an instance. As few moves as lead there; none, if the busiest
    instances have hardly more to do now.
    """
    seconds = {policy: work.get(policy, 0.0) for policy in loads}
    held = {policy: len(load.instances) for policy, load in loads.items()}
    wanted = allocation(seconds, sum(held.values()))
    if not all(held.values()) or _busiest(seconds, held) <= WORTH_MOVING * _busiest(seconds, wanted):
        return ()
    total = sum(seconds.values())
    return _moves_to(
        wanted,
        loads,
        lambda policy: (
            f"'{policy}' had {seconds[policy] / total:.0%} of the last steps' work, which is {wanted[policy]} instances"
        ),
    )


def moves_back(configured: Mapping[PolicyName, int], loads: Loads) -> Sequence[Move]:
    """Moves to the allocation that the run began with; where instances were lost since, to its proportions."""
    weights = {policy: float(configured.get(policy, 0)) for policy in loads}
    wanted = allocation(weights, sum(len(load.instances) for load in loads.values()))
    return _moves_to(wanted, loads, lambda policy: f"each step begins as configured, '{policy}' with {wanted[policy]}")


def _moves_to(wanted: Mapping[PolicyName, int], loads: Loads, because: Callable[[PolicyName], str]) -> Sequence[Move]:
    """As few as lead there; the idlest instances go. None while a policy waits for the replacement of its last one."""
    if not all(load.instances for load in loads.values()):
        return ()
    missing = {policy: wanted[policy] - len(load.instances) for policy, load in loads.items()}
    spare = [name for policy, load in loads.items() for name in idlest(load)[: max(0, -missing[policy])]]
    return [
        Move(spare.pop(), policy, because(policy)) for policy, number in missing.items() for _ in range(max(0, number))
    ]


def allocation(work: Mapping[PolicyName, float], count: int) -> Mapping[PolicyName, int]:
    """Instances of each policy, at least one: each further one to whoever has most work per instance.

    >>> allocation({"solver": 6.0, "verifier": 1.0}, 5)
    {'solver': 4, 'verifier': 1}
    """
    given = dict.fromkeys(work, 1)
    for _ in range(count - len(given)):
        given[max(given, key=lambda policy: (work[policy] / given[policy], policy))] += 1
    return given


def idlest(load: PolicyLoad) -> Sequence[InstanceId]:
    """Its instances, those that run least first."""
    return sorted(load.instances, key=lambda name: (load.instances[name], name))


def _busiest(seconds: Mapping[PolicyName, float], instances: Mapping[PolicyName, int]) -> float:
    return max((seconds[policy] / instances[policy] for policy in instances), default=0.0)


RULES: Mapping[str, Callable[[BalanceSettings], BalanceRule]] = {
    "none": lambda settings: Stay(),
    "queue_gap": lambda settings: QueueGap(settings.gap),
    "queue_gap_literal": lambda settings: QueueGap(settings.gap, literal=True),
    "drain_time": lambda settings: DrainTime(),
}
"""By `balance.rule`."""
