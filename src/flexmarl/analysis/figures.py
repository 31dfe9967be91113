"""Decides the figures of a simulated or real run, from its journal. `flexmarl simulate` prints them.

    step        ▕─────── rollout ───────▏── training ──▏─ other ─▏      other: publication, and what waits for it
    trainers          ▕── hidden ──▏    ▕── visible ───▏

All seconds are means over the steps. Work outside steps, such as an evaluation, is not counted.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexmarl.analysis.bound import Bound
from flexmarl.analysis.costs import Costs, costs_of
from flexmarl.analysis.facts import Facts
from flexmarl.events.overlap import intersection, seconds, union
from flexmarl.experience.staleness import LengthBias, length_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, standard deviation and range of some numbers."""

    mean: float
    std: float
    """Standard deviation of the sample; 0 for a single number."""
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one number.

        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, std=1.4142135623730951, least=1.0, most=3.0)
        """
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return cls(mean=mean, std=math.sqrt(squares / max(len(values) - 1, 1)), least=min(values), most=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Devices of a run. Utilisation is the share of their time that was used."""

    costs: Costs
    trainers_at_once: int | None = None
    """Trainers that hold devices at the same time; None if all of them do."""
    shared: bool = False
    """True if engines and trainers share the same devices (mode colocated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Calls of one policy that wait for a slot."""

    mean: float
    """Mean over time."""
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Figures of a run. Seconds are those of its own clock, virtual or real."""

    steps: int
    makespan_s: float
    """Seconds of all steps together."""
    step_s: Spread
    rollout_s: float
    """Seconds in which episodes were played."""
    training_s: float
    """Seconds in which a trainer worked and no episode was played."""
    hidden_s: float
    """Seconds in which a trainer worked while episodes were played; part of `rollout_s`."""
    other_s: float
    """The rest of the step."""
    tokens: int
    """Tokens sampled in training rollouts."""
    turns: int
    rollout_utilisation: float
    """Device-seconds with a call, as a share of all device-seconds of the instances; 0 to 1."""
    training_utilisation: float
    """The same for trainers."""
    utilisation: float
    """The same for engines and trainers together."""
    queues: Mapping[str, Queue]
    """Waiting calls, by policy."""
    moves: int
    swaps: int
    """How often a trainer's state came onto devices or was set aside."""
    staleness_mean: float
    """Mean number of updates between the version that sampled a token and the one that its update was applied to."""
    staleness_most: int
    publish_lag_s: float
    """Mean seconds from the end of an update until all instances serve its version."""
    length_bias: LengthBias | None
    """Lengths of trained groups against those of admitted groups, in sampled tokens; None if no group was trained."""
    bound: Bound | None = None
    """Lower bound of the step time, mean over the steps; None in modes whose steps have no separate time."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of makespan."""
        return self.tokens / self.makespan_s

    @property
    def bound_ratio(self) -> float | None:
        """Mean step time divided by the lower bound; 1 is optimal. None without a bound."""
        return self.step_s.mean / self.bound.total_s if self.bound and self.bound.total_s else None


def report_of(facts: Facts, pools: Pools, *, bound: Bound | None = None) -> SimulationReport | None:
    """Computes the figures of a run; None if no step of it has ended."""
    if not facts.steps:
        return None
    steps = len(facts.steps)
    playing, training = facts.playing, facts.training()
    at_work = union(interval for busy in training.values() for interval in busy)
    hidden = seconds(intersection(at_work, playing))
    rollout, makespan = seconds(playing), facts.makespan_s
    visible = seconds(at_work) - hidden
    mean, most = staleness(facts)
    serving, trained = _serving_share(facts, pools), _training_share(facts, pools)
    return SimulationReport(
        steps=steps,
        makespan_s=makespan,
        step_s=Spread.of([step.ended - step.began for step in facts.steps]),
        rollout_s=rollout / steps,
        training_s=visible / steps,
        hidden_s=hidden / steps,
        other_s=(makespan - rollout - visible) / steps,
        tokens=sum(call.sampled_tokens for call in facts.calls),
        turns=len(facts.calls),
        rollout_utilisation=serving.used / serving.available if serving.available else 0.0,
        training_utilisation=trained.used / trained.available if trained.available else 0.0,
        utilisation=_both(serving, trained, shared=pools.shared),
        queues=queues(facts),
        moves=len(facts.moves),
        swaps=len(facts.swaps),
        staleness_mean=mean,
        staleness_most=most,
        publish_lag_s=publish_lag(facts),
        length_bias=bias_of(facts),
        bound=bound,
    )


@dataclass(frozen=True, slots=True)
class _DeviceSeconds:
    used: float
    available: float


def _serving_share(facts: Facts, pools: Pools) -> _DeviceSeconds:
    policy_of = {call.instance: call.policy for call in facts.calls} | {
        load.instance: load.policy for load in facts.loads
    }
    engines = {name: costs_of(pools.costs, policy).engine for name, policy in policy_of.items()}
    used = sum(
        seconds(busy) * engines[name].devices * engines[name].busy_share for name, busy in facts.serving().items()
    )
    available = sum(engines[name].devices for name in facts.instances) * facts.makespan_s
    grown = sum(
        costs_of(pools.costs, name.policy).engine.devices * seconds(intersection([there], facts.span))
        for name, there in facts.grown.items()
    )
    return _DeviceSeconds(used, available + grown)


def _training_share(facts: Facts, pools: Pools) -> _DeviceSeconds:
    training = facts.training()
    devices = {policy: costs_of(pools.costs, policy).trainer.devices for policy in training}
    used = sum(seconds(busy) * devices[policy] for policy, busy in training.items())
    held = sorted(devices.values(), reverse=True)[: pools.trainers_at_once]
    return _DeviceSeconds(used, sum(held) * facts.makespan_s)


def _both(serving: _DeviceSeconds, training: _DeviceSeconds, *, shared: bool) -> float:
    available = max(serving.available, training.available) if shared else serving.available + training.available
    return (serving.used + training.used) / available if available else 0.0


def queues(facts: Facts) -> dict[str, Queue]:
    """Waiting calls of each policy over the time in steps; empty if `facts.queue_counts` is empty."""
    span = facts.span
    area: defaultdict[str, float] = defaultdict(float)
    most: defaultdict[str, int] = defaultdict(int)
    ends = [counts.t for counts in facts.queue_counts[1:]] + [max((end for _, end in span), default=0.0)]
    for counts, end in zip(facts.queue_counts, ends, strict=False):
        inside = intersection([(counts.t, end)], span)
        for policy, waiting in counts.queued.items():
            area[policy] += waiting * seconds(inside)
            most[policy] = max(most[policy], waiting if inside else 0)
    makespan = facts.makespan_s
    return {policy: Queue(mean=area[policy] / makespan, most=most[policy]) for policy in area}


def staleness(facts: Facts) -> tuple[float, int]:
    """Mean staleness over the trained tokens, and the largest one, in updates."""
    trained_at = facts.trained_at or _versions_before(facts)
    total, tokens, most = 0.0, 0, 0
    for call in facts.calls:
        version = trained_at.get((call.policy, call.group))
        if version is not None:
            lag = max(0, version - call.version)
            total, tokens, most = total + lag * call.sampled_tokens, tokens + call.sampled_tokens, max(most, lag)
    return (total / tokens if tokens else 0.0), most


def _versions_before(facts: Facts) -> dict[tuple[str, int], int]:
    """By policy and trained group, the version that the update of the group's step was applied to."""
    before: dict[tuple[str, int], int] = {}
    earlier = [{}, *(step.versions for step in facts.steps)]
    for step, versions in zip(facts.steps, earlier, strict=False):
        for policy, version in step.versions.items():
            applied = versions.get(policy, max(0, version - 1))
            before |= {(policy, group): applied for group in step.trained}
    return before


def publish_lag(facts: Facts) -> float:
    """Mean seconds from the end of an update until all instances serve its version; 0 without updates."""
    # The first time: a run that goes on publishes the version of its checkpoint again.
    served = {(one.policy, one.version): one.ended for one in reversed(facts.publications)}
    lags = [
        served[update.policy, update.version] - update.ended
        for update in facts.updates
        if (update.policy, update.version) in served
    ]
    return math.fsum(lags) / len(lags) if lags else 0.0


def bias_of(facts: Facts) -> LengthBias | None:
    """Compares trained with admitted groups by sampled tokens. A group still being played counts its tokens so far."""
    tokens: defaultdict[int, int] = defaultdict(int)
    for call in facts.calls:
        tokens[call.group] += call.sampled_tokens
    return length_bias([tokens[group] for step in facts.steps for group in step.trained], list(tokens.values()))
