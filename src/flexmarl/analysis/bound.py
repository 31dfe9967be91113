"""Decides a lower bound for the time of a synchronous step, which no schedule and no balancing can beat.

    max( longest trajectory, each of its calls alone on an instance        + the smallest last share of training
         all decode work, full batches on all instances, all the time      + the same
         first trajectory, then all training, trainers never idle )
    + one update + one publication

The times of tools are left out, so the bound holds for any tool time. The longest trajectory is counted at batch size
1, because a larger batch only slows it down. In FlexMARL's workloads this is the part that binds.

With `pipeline.ahead`, the last training, the update and the publication of a step may overlap the rollout of the next
step. Trajectories of the next step may end before its training begins. Three parts remain:

    max( longest trajectory, all decode work, all training )

A single step may then beat the bound, because the work that it left over counts in the time of the next step. The mean
over a run cannot beat the mean of each part (`mean_bound`).
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
    """The longest trajectory, if each of its calls has an instance to itself."""
    decode_s: float
    """All decode work, divided by the capacity of all instances."""
    training_s: float
    """The first trajectory to end, and then all training. With `ahead`, training alone."""
    share_s: float
    """Training that remains when the last trajectory ends. 0 with `ahead`."""
    end_s: float
    """Update and publication. 0 with `ahead`."""

    @property
    def total_s(self) -> float:
        """The lower bound: no step takes less."""
        return max(self.path_s + self.share_s, self.decode_s + self.share_s, self.training_s) + self.end_s

    @property
    def because(self) -> str:
        """The part that binds: `the longest trajectory`, `decoding on all instances` or `training`."""
        parts = {
            "the longest trajectory": self.path_s + self.share_s,
            "decoding on all instances": self.decode_s + self.share_s,
            "training": self.training_s,
        }
        return max(parts, key=lambda part: parts[part])


def mean_bound(bounds: Sequence[Bound]) -> Bound | None:
    """The mean of each part over several steps; None for no steps. Its total is at most the mean of their totals."""
    if not bounds:
        return None
    return Bound(
        **{part.name: math.fsum(getattr(one, part.name) for one in bounds) / len(bounds) for part in fields(Bound)}
    )


def bounds_of(
    facts: Facts, costs: Costs, *, instances: int, trainers_at_once: int | None, trained: Iterable[str], ahead: bool
) -> list[Bound]:
    """The bound of each step of a synchronous run. With `ahead` steps overlap: only the `mean_bound` of all holds."""
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
    """The bound of one step with these calls, whose rows were accumulated in the micro-batches `batches`.

    `instances` counts those of all policies together, since an instance may be moved, and those that were added.
    `trained` are the policies that are updated. With `ahead`, work that may overlap the next rollout is not counted.
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
    """Seconds of the longest chain of one trajectory's calls, each call alone on an instance.

    A chain is a series of calls in which each one was sent after the one before was answered.
    """
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
    """Seconds of a call that has an instance to itself.

    >>> one = a_call(began=0, ended=9, prompt_tokens=50, sampled_tokens=100)
    >>> alone_s(one, EngineCosts(decode_s=0.01, decode_request_s=0.002, prefill_token_s=0.001))
    1.25
    """
    held = call.prompt_tokens * call.sampled_tokens + call.sampled_tokens * (call.sampled_tokens - 1) / 2
    steps = call.sampled_tokens + engine.prefill_steps
    decoding = steps * (engine.decode_s + engine.decode_request_s) + held * engine.decode_kv_s
    return engine.call_s + call.computed_tokens * engine.prefill_token_s + decoding


def _capacity_s(call: Called, engine: EngineCosts) -> float:
    """The call's share of the seconds of an instance whose batch is full."""
    held = call.prompt_tokens * call.sampled_tokens + call.sampled_tokens * (call.sampled_tokens - 1) / 2
    token_s = engine.decode_s / engine.slots + engine.decode_request_s
    steps = call.sampled_tokens + engine.prefill_steps
    return call.computed_tokens * engine.prefill_token_s + steps * token_s + held * engine.decode_kv_s


def _training_work(batches: Iterable[MicroBatchDone], costs: Costs) -> dict[str, float]:
    """Seconds of accumulation of each policy's trainer."""
    work: defaultdict[str, float] = defaultdict(float)
    for batch in batches:
        trainer = costs_of(costs, batch.policy).trainer
        work[batch.policy] += trainer.micro_batch_s + batch.rows * trainer.sample_s + batch.tokens * trainer.token_s
    return dict(work)


def _spread_over(work: Mapping[str, float], trainers_at_once: int | None) -> float:
    """Least seconds for `work`. One trainer does the work of a policy; `trainers_at_once` trainers work in parallel."""
    at_once = min(trainers_at_once or len(work), len(work)) or 1
    return max(max(work.values(), default=0.0), math.fsum(work.values()) / at_once)


def _smallest_share(batches: Iterable[MicroBatchDone], costs: Costs) -> float:
    """Seconds of the cheapest micro-batch of one row."""
    trainers = [costs_of(costs, batch.policy).trainer for batch in batches]
    return min((trainer.micro_batch_s + trainer.sample_s for trainer in trainers), default=0.0)


def _end_s(policies: Iterable[str], costs: Costs) -> float:
    """Least seconds for an update and its publication, over the policies: the schedule chooses which one is last."""
    all_costs = [costs_of(costs, policy) for policy in policies]
    return min((one.trainer.update_s + one.trainer.publish_s + one.engine.load_s for one in all_costs), default=0.0)
