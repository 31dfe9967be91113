"""Decides the costs of decoding from the times at which calls were sent and answered. Used by fit.py.

    call      ▕─ call_s ─▏─ wait ─▏▓ prefill ▓▏─ step ─▏─ step ─▏ ... ─▏         sampled tokens = steps
    steps     (decode_s + decode_request_s b + decode_kv_s k) x slowdown by others on the machine

The calls of an instance give its batch size b and the tokens k that its batch holds, at every moment. They also give
who else was at work. The pace of the steps depends on the costs, which are not known yet. So steps are estimated and
costs are fitted in turns, until the costs settle.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from flexmarl.analysis.costs import EngineCosts
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.queues import BusyCount, Floats, level
from flexmarl.events.overlap import Interval, union
from flexmarl.events.serving_events import Called
from flexmarl.records import split_trajectory_id


def nonnegative(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients x >= 0 that make `columns @ x` closest to `seconds` in least squares.

    Tries every subset of the columns, so it is exact, but only for few columns. The result is the best unconstrained
    solution of a subset that has no negative coefficient.

    >>> nonnegative(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 5.0, 8.0])).round(6).tolist()
    [2.0, 3.0]
    """
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    scaled = columns / scale
    gram, target = scaled.T @ scaled, scaled.T @ seconds
    best, least = np.zeros(columns.shape[1]), 0.0
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), size)):
            found = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=1e-10)[0]
            # The squared error without the constant |seconds|^2. If two subsets are equally good, the smaller one wins.
            left = -float(target[chosen] @ found)
            if (found >= 0).all() and left < least - 1e-9 * abs(least):
                best, least = np.zeros(columns.shape[1]), left
                best[chosen] = found
    return best / scale


LEAST_SPREAD = 0.15
"""Least standard deviation of the neighbours at work, over calls or micro-batches, from which their share is fitted."""
MOST_SLOWDOWN = 4.0
"""Largest share by which a neighbour slows others down. Two that take turns on a core slow each other by about 1."""


def identified(neighbours: Floats) -> NDArray[np.bool_]:
    """Says of each column of `neighbours` [calls, kinds] whether it varies enough to fit a slowdown to it.

    With hardly any overlap a share could be anything: whatever delays a single call would be taken for it. With always
    the same overlap it cannot be told from the costs.

    >>> identified(np.array([[0.0, 1.0, 0.0], [0.01, 1.0, 1.0]])).tolist()
    [False, False, True]
    """
    return neighbours.std(axis=0) >= LEAST_SPREAD


def slowdowns(columns: Floats, seconds: Floats, kinds: NDArray[np.bool_]) -> Floats:
    """Shares by which each kind of neighbour slows down, at most MOST_SLOWDOWN; 0 for kinds that are not identified."""
    found = np.zeros(columns.shape[1])
    found[kinds] = np.minimum(nonnegative(columns[:, kinds], seconds), MOST_SLOWDOWN)
    return found


def relative_error(predicted: Floats, measured: Floats) -> float:
    """Mean absolute error, divided by the mean of `measured`; 0 if that mean is 0.

    >>> relative_error(np.array([1.0, 3.0]), np.array([2.0, 3.0]))
    0.2
    """
    total = float(np.abs(measured).sum())
    return float(np.abs(predicted - measured).sum()) / total if total else 0.0


def rounded(value: float) -> float:
    """Rounds to four significant digits, since the measurements are no more precise.

    >>> rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.4g}")


ROUNDS = 400
"""Most turns of the fit. Many are needed: the slowdown by others separates from the costs only slowly."""
SETTLED = 1e-5
"""The fit ends with the first turn that changes no number by more than this share of it."""


class EngineFit:
    """Fits the decoding costs of all policies together, since they share the machine."""

    def __init__(self, facts: Facts, slots: Mapping[str, int], tool_s: Mapping[str, float] | None) -> None:
        busy: defaultdict[str, list[Interval]] = defaultdict(list)
        for call in facts.calls:
            busy[call.instance].append((call.began, call.ended))
        counts = {name: BusyCount([union(times)]) for name, times in busy.items()}
        all_engines = BusyCount([union(times) for times in busy.values()])
        trainers = BusyCount(facts.training().values())
        by_instance: defaultdict[tuple[str, str], list[Called]] = defaultdict(list)
        for call in facts.calls:
            by_instance[call.policy, call.instance].append(call)
        self._parts = {
            policy: [
                InstanceCalls(calls, slots[policy], trainers, all_engines, counts[instance])
                for (owner, instance), calls in by_instance.items()
                if owner == policy
            ]
            for policy in slots
        }
        spans = [(call.began, call.ended) for call in facts.calls]
        self._identified = identified(np.stack([trainers.during(spans), all_engines.during(spans) - 1.0], axis=1))
        self._pauses = dict.fromkeys(slots, 0.0) | ({} if tool_s is None else pauses_of(facts, tool_s))
        self.per_trainer = self.per_engine = 0.0
        self._found = {policy: _first_guess(parts) for policy, parts in self._parts.items()}
        for _ in range(ROUNDS):
            before = self._all()
            self._improve()
            if np.allclose(self._all(), before, rtol=SETTLED, atol=1e-12):
                break

    def costs(self, policy: str) -> EngineCosts:
        """Returns the fitted costs of a policy. `call_s` includes the pauses between calls, if they are known."""
        call, step, request, kv, prefill = map(rounded, self._found[policy])
        return EngineCosts(
            call_s=rounded(call + self._pauses[policy]),
            decode_s=step,
            decode_request_s=request,
            decode_kv_s=kv,
            prefill_token_s=prefill,
        )

    def error(self, policy: str) -> float:
        """Relative error of the fitted seconds of the policy's calls."""
        columns, seconds = self._columns(policy)
        return relative_error(columns @ self._found[policy], seconds)

    def _all(self) -> Floats:
        return np.concatenate([*self._found.values(), [self.per_trainer, self.per_engine]])

    def _improve(self) -> None:
        """Fits each policy's costs with the slowdown fixed, and then the slowdown with these costs fixed."""
        for policy in self._parts:
            for part in self._parts[policy]:
                part.estimate_steps(self._found[policy], self.per_trainer, self.per_engine)
            self._found[policy] = nonnegative(*self._columns(policy))
        slowed = [part.slowed(self._found[policy]) for policy, parts in self._parts.items() for part in parts]
        columns, seconds = (np.concatenate(pieces) for pieces in zip(*slowed, strict=True))
        self.per_trainer, self.per_engine = slowdowns(columns, seconds, self._identified)

    def _columns(self, policy: str) -> tuple[Floats, Floats]:
        pieces = [part.columns() for part in self._parts[policy]]
        return np.concatenate([columns for columns, _ in pieces]), np.concatenate([seconds for _, seconds in pieces])


class InstanceCalls:
    """The calls of one instance. Its time is cut into segments in which its batch does not change."""

    def __init__(self, calls: Sequence[Called], slots: int, trainers: BusyCount, *engines: BusyCount) -> None:
        # Calls sent at the same moment are sorted by group, the order in which rollout started them.
        calls = sorted(calls, key=lambda call: (call.began, split_trajectory_id(call.trajectory)))
        self._slots = slots
        self._others = (trainers, *engines)  # all trainers, all engines, this engine
        self._sent = np.array([call.began for call in calls])
        self._ended = np.array([call.ended for call in calls])
        self._sampled = np.array([max(call.sampled_tokens - call.kept_tokens, 1) for call in calls], dtype=float)
        self._prompt = np.array([call.computed_tokens for call in calls], dtype=float)
        self._context = np.array([call.prompt_tokens + call.kept_tokens for call in calls], dtype=float)

    @property
    def pace(self) -> float:
        """Median seconds per sampled token."""
        return float(np.median((self._ended - self._sent) / self._sampled))

    def estimate_steps(self, found: Floats, per_trainer: float, per_engine: float) -> None:
        """Estimates how many steps each call was in under the costs `found`, and how far others slowed these steps."""
        joined = self._joined(float(found[0]))
        edges = np.unique(np.concatenate([joined, self._ended]))
        first, last = np.searchsorted(edges, joined), np.searchsorted(edges, self._ended)
        lengths = np.diff(edges)
        size = level(first, last, np.ones(len(joined)), len(lengths))
        kv = level(first, last, self._context + self._sampled / 2, len(lengths))
        prefill = np.bincount(first, self._prompt, minlength=len(edges)).astype(np.float64)[: len(lengths)]
        trainers, engines, own = (counts.mean(edges) for counts in self._others)
        others = np.maximum(engines - own, 0.0)
        slow = 1.0 + per_trainer * trainers + per_engine * others
        step = np.maximum((found[1] + found[2] * size + found[3] * kv) * slow, 1e-9)
        steps = np.maximum(lengths - prefill * found[4] * slow, 1e-3 * lengths) / step

        def within(values: Floats) -> Floats:
            total = np.concatenate([[0.0], np.cumsum(values)])
            return total[last] - total[first]

        # Each call is scaled to as many steps as it sampled tokens.
        share = self._sampled / np.maximum(within(steps), 1e-12)
        in_steps = (np.ones_like(lengths), size, kv)
        self._units = {
            name: np.stack([*(share * within(steps * unit * times) for unit in in_steps), within(prefill * times)], 1)
            for name, times in (("alone", np.ones_like(lengths)), ("trainers", trainers), ("engines", others))
        }
        slowed = self._units["alone"] + per_trainer * self._units["trainers"] + per_engine * self._units["engines"]
        # The times of a call that waited do not depend on call_s: it had arrived before a slot was free.
        waited = joined - self._sent - found[0] > 1e-6
        self._has_call_s = np.where(waited, 0.0, 1.0)
        self._columns = np.concatenate([self._has_call_s[:, None], slowed], axis=1)
        self._took = self._ended - np.where(waited, joined, self._sent)

    def columns(self) -> tuple[Floats, Floats]:
        """The columns [calls, 5] of the fit, and the measured seconds [calls].

        The columns belong to call_s, decode_s, decode_request_s, decode_kv_s and prefill_token_s.
        """
        return self._columns, self._took

    def slowed(self, found: Floats) -> tuple[Floats, Floats]:
        """The columns [calls, 2] of the slowdown per trainer and per other engine, and the seconds left to explain.

        These are the measured seconds [calls] less those that the costs `found` explain without slowdown.
        """
        alone, trainers, engines = (self._units[name] @ found[1:] for name in ("alone", "trainers", "engines"))
        return np.stack([trainers, engines], axis=1), self._took - found[0] * self._has_call_s - alone

    def _joined(self, call_s: float) -> Floats:
        """When each call joined the batch: it had arrived, and a slot was free."""
        arrived = np.minimum(self._sent + call_s, self._ended - 1e-6)
        joined, running = arrived.copy(), list[float]()
        for index in np.argsort(arrived, kind="stable"):
            while running and running[0] <= joined[index]:
                heappop(running)
            if len(running) >= self._slots:
                joined[index] = min(max(joined[index], heappop(running)), self._ended[index] - 1e-6)
            heappush(running, float(self._ended[index]))
        return joined


def pauses_of(facts: Facts, tool_s: Mapping[str, float]) -> dict[str, float]:
    """By policy, mean seconds from an answer to the trajectory's next call, less those of tools and in the pool."""
    latest: dict[str, float] = {}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for call in sorted(facts.calls, key=lambda call: call.began):
        before = latest.get(call.trajectory)
        if before is not None and before <= call.began:
            took = call.waited_s + tool_s.get(call.request, 0.0)
            found[call.policy].append(max(0.0, call.began - before - took))
        latest[call.trajectory] = max(before or 0.0, call.ended)
    return {policy: fmean(values) for policy, values in found.items()}


def _first_guess(parts: Sequence[InstanceCalls]) -> Floats:
    """Initial costs: only `decode_s` is not 0, as if every call ran alone."""
    return np.array([0.0, median(part.pace for part in parts), 0.0, 0.0, 0.0])
