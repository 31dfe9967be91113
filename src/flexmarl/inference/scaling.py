"""Decides which instances move from one policy to another (FlexMARL section 5.2; docs/math.md, section 10).

    queue_gap          one instance per decision, when the numbers of waiting requests differ by more than the gap
    queue_gap_literal  as many instances as that difference, as the paper words it
    drain_time         as many instances as make the queued requests end sooner, each by itself

No rule takes the last instance of a policy. `Demand` estimates the expected length and speed of a policy's requests,
from the requests that it has answered:

    expected tokens of a request that waits           c E[L]
    expected tokens left of a request that runs       c E[L^2] / 2 E[L]: longer requests are likelier to be running
    c, because short requests are answered first      (seconds of answered and of running requests) / of answered ones

L is the number of sampled tokens of an answer. The lengths of waiting and running requests themselves are unknown. A
policy that has answered none yet is expected to be like the others together.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName

KEPT_PER_STEP = 0.95
"""Factor by which the weight of earlier answers falls at the end of each step, so that about twenty steps count. With
about five, allocations followed chance, because tasks differ so much."""


@dataclass(slots=True)
class _Sums:
    answers: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    serving_s: float = 0.0

    def expectation(self, running_s: float) -> "Expectation":
        if not self.answers:  # Speed and lengths are unknown. Only their ratio counts, which is a time.
            return Expectation(tokens=running_s, tokens_left=running_s, tokens_per_s=1.0)
        longer = 1 + running_s / self.serving_s
        return Expectation(
            tokens=longer * self.tokens / self.answers,
            tokens_left=longer * self.squares / (2 * self.tokens),
            tokens_per_s=self.tokens / self.serving_s,
        )

    def plus(self, *others: "_Sums") -> "_Sums":
        every = (self, *others)
        return _Sums(*(sum(getattr(one, name) for one in every) for name in self.__slots__))

    def fade(self) -> None:
        self.answers *= KEPT_PER_STEP
        self.tokens *= KEPT_PER_STEP
        self.squares *= KEPT_PER_STEP
        self.serving_s *= KEPT_PER_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Estimated tokens, and tokens per second, of one policy's requests."""

    tokens: float
    """Expected tokens of a request that waits."""
    tokens_left: float
    """Expected tokens that a running request has still to sample."""
    tokens_per_s: float
    """Tokens that one request gets per second while an instance serves it."""


class Demand:
    """Sums over the answered requests of each policy. Older steps count less and less."""

    def __init__(self) -> None:
        self._sums: dict[PolicyName, _Sums] = defaultdict(_Sums)
        self._steps = 0.0

    def answered(self, policy: PolicyName, *, tokens: int, serving_s: float) -> None:
        """Counts a request for which an instance sampled `tokens`, and which it served for `serving_s`."""
        if tokens and serving_s > 0:
            sums = self._sums[policy]
            sums.answers += 1
            sums.tokens += tokens
            sums.squares += tokens**2
            sums.serving_s += serving_s

    def step_ended(self) -> None:
        """Ends a step: the weight of all answers so far falls."""
        for sums in self._sums.values():
            sums.fade()
        self._steps = KEPT_PER_STEP * (self._steps + 1)

    def expected(self, policy: PolicyName, running_s: Mapping[PolicyName, float] = {}) -> Expectation | None:
        """Estimates for the policy's requests, from those of all policies if it has answered none yet.

        `running_s` is how long the running requests of each policy have run, summed. Returns None if no request of any
        policy has run yet.
        """
        own = self._sums.get(policy, _Sums())
        if own.answers:
            return own.expectation(running_s.get(policy, 0.0))
        every, seconds = _Sums().plus(*self._sums.values()), sum(running_s.values())
        return every.expectation(seconds) if every.answers or seconds else None

    @property
    def work(self) -> Mapping[PolicyName, float]:
        """Mean seconds of serving per step for each policy, over the last steps. Read it between steps."""
        return {policy: sums.serving_s / self._steps for policy, sums in self._sums.items() if self._steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoad:
    """One policy's queue and instances at one moment."""

    instances: Mapping[InstanceId, int] = field(default_factory=dict)
    """Number of requests that each live instance runs, by name."""
    waiting: int = 0
    """Number of requests that no instance runs; they wait in the pool or in an engine."""
    slots: int = 1
    """Number of requests that an instance can run at a time."""
    expected: Expectation | None = None
    """Expected length and speed of its requests; None if it has answered none yet."""
    kind: str = ""
    """Policies of equal kind take over each other's instances by loading weights. Between others a new one starts."""
    start_s: float = 0.0
    """Expected seconds until a new instance serves: its start, and the load of its weights."""
    starting: int = 0
    """Number of instances that are being started for it, beyond those in `instances`."""

    @property
    def running(self) -> int:
        """Number of requests that its instances run."""
        return sum(self.instances.values())


@dataclass(frozen=True, slots=True)
class Move:
    """The decision that an instance serves the policy `to` from now on, and why."""

    instance: InstanceId
    to: PolicyName
    because: str


def seconds_of(move_s: float, donor: PolicyLoad, to: PolicyLoad) -> float:
    """Seconds that a move between two policies is expected to take: `move_s` if weights are all that has to change."""
    return move_s if donor.kind == to.kind else to.start_s


Loads = Mapping[PolicyName, PolicyLoad]
WORTH_MOVING = 1.05
"""Factor by which the work of the busiest instances must exceed that of the best allocation. The work of steps varies
by about as much by chance."""


class BalanceRule(Protocol):
    """A rule that decides moves from the loads of all policies, at intervals while a step plays."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """The moves to make now. Between policies of one kind, a move is expected to take `move_s` seconds."""
        ...


class Stay:
    """Never moves an instance."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """No moves."""
        return ()


@dataclass(frozen=True, slots=True)
class QueueGap:
    """FlexMARL's rule: moves from the shortest queue to the longest, if they differ by more than `gap` requests."""

    gap: int
    literal: bool = False
    """Moves as many instances as the queues differ by, not one. It overshoots: the next decision moves them back."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """Moves the idlest instances to the longest queue. `move_s` is ignored."""
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
    """Our rule: moves instances to the policy that takes longest to drain, from those that spare them best."""

    least_gain: float = 0.05
    """Least share of the longest drain time that each move must save: less is chance, and is moved back."""
    most: float = 0.25
    """Most moves of a decision, as a share of all instances. What moves serves nobody, and queues change meanwhile."""

    def decide(self, loads: Loads, *, move_s: float) -> Sequence[Move]:
        """The moves that shorten the longest drain time most, one after the other, each as if those before were made.

        `queue_gap` makes one move and waits until it is made. Where one policy has most of the work, that takes longer
        than the work does.
        """
        known = {policy: load for policy, load in loads.items() if load.expected is not None}
        arriving, moves = defaultdict[PolicyName, float](float), list[Move]()
        most = max(1, int(self.most * sum(len(load.instances) for load in loads.values())))
        while len(moves) < most and (best := self._best(known, arriving, move_s)):
            donor, move = best
            moves.append(move)
            arriving[move.to] += seconds_of(move_s, known[donor], known[move.to])
            known[donor] = without(known[donor], move.instance)
            known[move.to] = replace(known[move.to], instances={**known[move.to].instances, move.instance: 0})
        return moves

    def _best(
        self, known: Mapping[PolicyName, PolicyLoad], arriving: Mapping[PolicyName, float], move_s: float
    ) -> tuple[PolicyName, Move] | None:
        """The move that shortens the longest drain time most, with its donor.

        `arriving` has the policies that instances are on their way to, with the seconds that these take together.
        """
        drains = {policy: drain_s(load, missed_s=arriving.get(policy, 0.0)) for policy, load in known.items()}
        to = last_to_drain(known, drains)
        if to is None:
            return None
        before = drains[to]
        best: tuple[float, PolicyName] | None = None
        for donor in known.keys() - arriving.keys() - {to}:
            takes_s = seconds_of(move_s, known[donor], known[to])
            if len(known[donor].instances) < 2 or before <= 2 * takes_s:
                # An instance is idle for takes_s, and needs as long again to make up for it. The step lasts at least
                # the longest drain time, so only a drain time above 2 * takes_s leaves time for a gain.
                continue
            if drain_s(without(known[donor], idlest(known[donor])[0])) >= before:
                continue  # The next decision would find the donor overloaded, and move the instance back.
            after_to = drain_s(known[to], more=1, missed_s=arriving.get(to, 0.0) + takes_s)
            after = max(after_to, drain_s(known[donor], more=-1))
            best = min(best or (after, donor), (after, donor))
        if best is None or before - best[0] <= self.least_gain * before:
            return None
        after, donor = best
        because = f"'{to}' drains in {before:.1f} s; with one instance of '{donor}' both will have in {after:.1f} s"
        return donor, Move(idlest(known[donor])[0], to, because)


def last_to_drain(known: Loads, drains: Mapping[PolicyName, float]) -> PolicyName | None:
    """The policy with the longest drain time of those with waiting requests; None if no request waits."""
    return max((policy for policy in known if known[policy].waiting), key=lambda one: (drains[one], one), default=None)


def without(load: PolicyLoad, instance: InstanceId) -> PolicyLoad:
    """The load after the instance has left: the requests that it ran wait again."""
    left = {name: running for name, running in load.instances.items() if name != instance}
    return replace(load, instances=left, waiting=load.waiting + load.instances[instance])


def drain_s(load: PolicyLoad, *, more: int = 0, missed_s: float = 0.0) -> float:
    """Seconds until all waiting and running requests are done, if the number of instances changes by `more`.

    `missed_s` are the seconds until those of them serve that are on their way, summed. The result is the expected
    number of tokens left, divided by the tokens that all instances sample per second, but at least the time that one
    request takes alone. Instances that are being started count from `start_s` on. `load.expected` must not be None.
    """
    expected = load.expected
    assert expected is not None
    queued_tokens = load.waiting * expected.tokens + load.running * expected.tokens_left
    if not queued_tokens:
        return 0.0
    count = len(load.instances) + load.starting + more
    if not count:
        return float("inf")
    latency_s = (expected.tokens if load.waiting else expected.tokens_left) / expected.tokens_per_s
    missed_s += load.starting * load.start_s
    return max((queued_tokens / (load.slots * expected.tokens_per_s) + missed_s) / count, latency_s)


def start_moves(work: Mapping[PolicyName, float], loads: Loads) -> Sequence[Move]:
    """The fewest moves to the allocation whose busiest instances have the least to do.

    `work` is the seconds of serving that a step needs from each policy. Every policy keeps an instance. There are no
    moves if a policy has no live instance, or if the busiest instances now have at most WORTH_MOVING times as much to
    do as they would have in that allocation.
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
    """The moves to the allocation that the run began with: in proportion if instances were lost since.

    If there are more instances than at the beginning, further ones stay where they are.
    """
    begun = {policy: configured.get(policy, 0) for policy in loads}
    held = {policy: len(load.instances) for policy, load in loads.items()}
    total = sum(held.values())
    if total >= sum(begun.values()):
        wanted = {policy: max(held[policy], begun[policy]) for policy in loads}
        while sum(wanted.values()) > total:
            wanted[max(wanted, key=lambda policy: (wanted[policy] - begun[policy], policy))] -= 1
    else:
        wanted = allocation(begun, total)
    return _moves_to(wanted, loads, lambda policy: f"each step begins as configured, '{policy}' with {wanted[policy]}")


def _moves_to(wanted: Mapping[PolicyName, int], loads: Loads, because: Callable[[PolicyName], str]) -> Sequence[Move]:
    """The fewest moves to the allocation `wanted`, by the idlest instances. None if a policy has no live instance.

    Instances of a policy's own kind go there first, as they only load weights.
    """
    if not all(load.instances for load in loads.values()):
        return ()
    missing = {policy: wanted[policy] - len(load.instances) for policy, load in loads.items()}
    spare = [(load.kind, name) for one, load in loads.items() for name in idlest(load)[: max(0, -missing[one])]]
    moves = list[Move]()
    for policy in (policy for policy, number in missing.items() for _ in range(max(0, number))):
        alike = [one for one in spare if one[0] == loads[policy].kind]
        spare.remove(goes := (alike or spare)[-1])
        moves.append(Move(goes[1], policy, because(policy)))
    return moves


def allocation(work: Mapping[PolicyName, float], count: int) -> Mapping[PolicyName, int]:
    """Number of instances per policy: one each, then each further one to the policy with the most work per instance.

    >>> allocation({"solver": 6.0, "verifier": 1.0}, 5)
    {'solver': 4, 'verifier': 1}
    """
    given = dict.fromkeys(work, 1)
    for _ in range(count - len(given)):
        given[max(given, key=lambda policy: (work[policy] / given[policy], policy))] += 1
    return given


def idlest(load: PolicyLoad) -> Sequence[InstanceId]:
    """The policy's instances, in order of the number of requests that they run, lowest first."""
    return sorted(load.instances, key=lambda name: (load.instances[name], name))


def _busiest(seconds: Mapping[PolicyName, float], instances: Mapping[PolicyName, int]) -> float:
    return max((seconds[policy] / instances[policy] for policy in instances), default=0.0)


RULES: Mapping[str, Callable[[BalanceSettings], BalanceRule]] = {
    "none": lambda settings: Stay(),
    "queue_gap": lambda settings: QueueGap(settings.gap),
    "queue_gap_literal": lambda settings: QueueGap(settings.gap, literal=True),
    "drain_time": lambda settings: DrainTime(),
}
"""The balancing rules, by the values of `balance.rule`."""
STARTS: Mapping[str, Callable[[Mapping[PolicyName, float], Loads], Sequence[Move]]] = {
    "as_configured": lambda configured, loads: moves_back(
        {policy: int(count) for policy, count in configured.items()}, loads
    ),
    "by_share": start_moves,
}
"""The rules for the end of a rollout, by the values of `balance.start`, and the basis that each takes."""
