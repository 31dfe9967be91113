"""Decides how fast a synchronous step could be at best: less than that no schedule and no balancing can reach.

    max( longest trajectory, each of its calls alone on an instance        + the smallest last share of training
         all decode work, full batches on all instances, all the time      + the same
         first trajectory, then all training, trainers never idle )
    + one update + one publication

Times of tools are left out, so the bound holds whatever they take. After FlexMARL's workloads, where the longest
trajectory binds: rollout at batch 1, since a batch only slows it down.

With `pipeline.ahead`, a step's last training, update and publication lie beside the rollout of the next one, which may
have trajectories ended before its trainers begin. Left are rollouts in a row, decode work, and training in a row:

    max( longest trajectory, all decode work, all training )

Then a single step may beat it, since what it left over is in the next one's time; the mean over a run cannot beat the
mean of each part (`mean_bound`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush

from flexmarl.analysis.costs import Costs, EngineCosts, costs_of
from flexmarl.analysis.facts import Facts
from flexmarl.events.serving_events import Called
from flexmarl.events.training_events import MicroBatchDone


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The parts of a lower bound, in seconds."""

    path_s: float
    """The longest trajectory, alone."""
    decode_s: float
    """All decode work by the capacity of all instances."""
    training_s: float
    """The first trajectory, and then all training; ahead: training alone."""
    share_s: float
    """What must still be trained when the last trajectory ends; ahead: 0."""
    end_s: float
    """Update and publication; ahead: 0."""

    @property
    def total_s(self) -> float:
        """No step takes less."""
        return max(self.path_s + self.share_s, self.decode_s + self.share_s, self.training_s) + self.end_s

    @property
    def because(self) -> str:
        """Which part binds."""
        parts = {
            "the longest trajectory": self.path_s + self.share_s,
            "decoding on all instances": self.decode_s + self.share_s,
            "training": self.training_s,
        }
        return max(parts, key=lambda part: parts[part])


def mean_bound(bounds: Sequence[Bound]) -> Bound | None:
    """Of several steps, whose parts need not bind alike: its total is at most the mean of theirs."""
    if not bounds:
        return None
    return Bound(
        **{part.name: math.fsum(getattr(one, part.name) for one in bounds) / len(bounds) for part in fields(Bound)}
    )


def bounds_of(
    facts: Facts,
    costs: Costs,
    *,
    instances: int,
    trainers_at_once: int | None,
    trained: Iterable[str],
    ahead: bool,
) -> list[Bound]:
    """One for each step of a synchronous run; `ahead`: steps overlap, and only `mean_bound` of all is a bound."""
    calls: defaultdict[int, list[Called]] = defaultdict(list)
    for call in facts.calls:
        calls[facts.step_of[call.group]].append(call)
    batches: defaultdict[int, list[MicroBatchDone]] = defaultdict(list)
    ends = iter(facts.steps)
    step = next(ends, None)
    for batch in sorted(facts.micro_batches, key=lambda batch: batch.ended):
        while step is not None and batch.ended > step.ended:
            step = next(ends, None)
        if step is not None:
            batches[step.step].append(batch)
    return [
        step_bound(
            calls[step.step],
            batches[step.step],
            costs,
            instances=instances,
            trainers_at_once=trainers_at_once,
            trained=trained,
            ahead=ahead,
        )
        for step in facts.steps
    ]


def step_bound(
    calls: Sequence[Called],
    batches: Sequence[MicroBatchDone],
    costs: Costs,
    *,
    instances: int,
    trainers_at_once: int | None = None,
    trained: Iterable[str],
    ahead: bool = False,
) -> Bound:
    """Of one step with these calls, whose rows were accumulated in these micro-batches.

    `instances` of all policies together, since an instance may be moved; `trained` are the policies that are updated;
    `ahead`: what may lie beside the next rollout counts as nothing.
    """
    by_trajectory: defaultdict[str, list[Called]] = defaultdict(list)
    for call in calls:
        by_trajectory[call.trajectory].append(call)
    paths = [path_s(own, costs) for own in by_trajectory.values()]
    work = _training_work(batches, costs)
    all_trained = sum(batch.rows for batch in batches) == sum(call.policy in set(trained) for call in calls)
    return Bound(
        path_s=max(paths, default=0.0),
        decode_s=math.fsum(_capacity_s(call, costs_of(costs, call.policy).engine) for call in calls) / instances,
        training_s=(0.0 if ahead else min(paths, default=0.0)) + _spread_over(work, trainers_at_once),
        share_s=_smallest_share(batches, costs) if all_trained and not ahead else 0.0,
        end_s=0.0 if ahead else _end_s(work, costs),
    )


def path_s(calls: Iterable[Called], costs: Costs) -> float:
    """The longest chain of one trajectory's calls, each sent when the one before had been answered, each alone."""
    under_way: list[tuple[float, float]] = []  # (answered at, length of the chain up to then)
    before = longest = 0.0
    for call in sorted(calls, key=lambda call: call.began):
        while under_way and under_way[0][0] <= call.began:
            before = max(before, heappop(under_way)[1])
        chain = before + alone_s(call, costs_of(costs, call.policy).engine)
        longest = max(longest, chain)
        heappush(under_way, (call.ended, chain))
    return longest


def alone_s(call: Called, engine: EngineCosts) -> float:
    """The call with an instance to itself.

    >>> one = a_call(began=0, ended=9, prompt_tokens=50, sampled_tokens=100)      # of flexmarl.testing.events
    >>> alone_s(one, EngineCosts(decode_s=0.01, decode_request_s=0.002, prefill_token_s=0.001))
    1.25
    """
    held = call.prompt_tokens * call.sampled_tokens + call.sampled_tokens * (call.sampled_tokens - 1) / 2
    steps = call.sampled_tokens + engine.prefill_steps
    decoding = steps * (engine.decode_s + engine.decode_request_s) + held * engine.decode_kv_s
    return engine.call_s + call.computed_tokens * engine.prefill_token_s + decoding


def _capacity_s(call: Called, engine: EngineCosts) -> float:
    """The call's share of an instance whose batch is full."""
    held = call.prompt_tokens * call.sampled_tokens + call.sampled_tokens * (call.sampled_tokens - 1) / 2
    token_s = engine.decode_s / engine.slots + engine.decode_request_s
    steps = call.sampled_tokens + engine.prefill_steps
    return call.computed_tokens * engine.prefill_token_s + steps * token_s + held * engine.decode_kv_s


def _training_work(batches: Iterable[MicroBatchDone], costs: Costs) -> dict[str, float]:
    """Seconds of each policy's trainer."""
    work: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        trainer = costs_of(costs, batch.policy).trainer
        work[batch.policy] += trainer.micro_batch_s + batch.rows * trainer.sample_s + batch.tokens * trainer.token_s
    return dict(work)


def _spread_over(work: Mapping[str, float], trainers_at_once: int | None) -> float:
    """A policy's own work is done in a row; all of it by as many trainers as hold devices."""
    at_once = min(trainers_at_once or len(work), len(work)) or 1
    return max(max(work.values(), default=0.0), math.fsum(work.values()) / at_once)


def _smallest_share(batches: Iterable[MicroBatchDone], costs: Costs) -> float:
    """One row in a micro-batch of its own."""
    trainers = [costs_of(costs, batch.policy).trainer for batch in batches]
    return min((trainer.micro_batch_s + trainer.sample_s for trainer in trainers), default=0.0)


def _end_s(policies: Iterable[str], costs: Costs) -> float:
    """The policy that takes least: which one is last is the schedule's choice."""
    all_costs = [costs_of(costs, policy) for policy in policies]
    return min((one.trainer.update_s + one.trainer.publish_s + one.engine.load_s for one in all_costs), default=0.0)
