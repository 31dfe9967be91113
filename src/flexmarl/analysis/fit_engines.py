"""Decides what decoding took, from when calls were sent and answered: the half of fit.py that is about engines.

    call      ▕─ call_s ─▏─ wait ─▏▓ prefill ▓▏─ step ─▏─ step ─▏ ... ─▏         sampled tokens = steps
    steps     (decode_s + decode_request_s b + decode_kv_s k) x how much others slow the machine

How many requests b, with how many tokens k, an instance had at a moment, follows from all its calls; so does who else
was at work. How fast the steps followed each other then follows from the costs that are looked for: steps are estimated
and costs fitted in turns, until they agree.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from statistics import median

import numpy as np

from flexmarl.analysis.costs import EngineCosts
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.queues import Crowd, level
from flexmarl.analysis.regression import Floats, nonnegative, relative_error, rounded
from flexmarl.events.overlap import Interval, union
from flexmarl.events.serving_events import Called
from flexmarl.records import split_trajectory_id

ROUNDS = 400
"""Turns at most; slowdown by others and the costs themselves come apart slowly."""
SETTLED = 1e-5
"""A turn that changes nothing by more than this share was the last."""


class EngineFit:
    """Costs of decoding, of all policies at once: they share the machine."""

    def __init__(self, facts: Facts, slots: Mapping[str, int], *, pauses: bool) -> None:
        busy: defaultdict[str, list[Interval]] = defaultdict(list)
        for call in facts.calls:
            busy[call.instance].append((call.began, call.ended))
        crowd = {name: Crowd([union(times)]) for name, times in busy.items()}
        everyone = Crowd([union(times) for times in busy.values()])
        trainers = Crowd(facts.training().values())
        by_instance: defaultdict[tuple[str, str], list[Called]] = defaultdict(list)
        for call in facts.calls:
            by_instance[call.policy, call.instance].append(call)
        self._parts = {
            policy: [
                InstanceCalls(calls, slots[policy], trainers, everyone, crowd[instance])
                for (owner, instance), calls in by_instance.items()
                if owner == policy
            ]
            for policy in slots
        }
        self._pauses = dict.fromkeys(slots, 0.0) | (pauses_of(facts) if pauses else {})
        self.per_trainer = self.per_engine = 0.0
        self._found = {policy: _first_guess(parts) for policy, parts in self._parts.items()}
        for _ in range(ROUNDS):
            before = self._all()
            self._improve()
            if np.allclose(self._all(), before, rtol=SETTLED, atol=1e-12):
                break

    def costs(self, policy: str) -> EngineCosts:
        """What was found; on the way of a call is also what the controller does before the next one."""
        call, step, request, kv, prefill = map(rounded, self._found[policy])
        return EngineCosts(
            call_s=rounded(call + self._pauses[policy]),
            decode_s=step,
            decode_request_s=request,
            decode_kv_s=kv,
            prefill_token_s=prefill,
        )

    def error(self, policy: str) -> float:
        """Relative error of the calls' seconds."""
        columns, seconds = self._columns(policy)
        return relative_error(columns @ self._found[policy], seconds)

    def _all(self) -> Floats:
        return np.concatenate([*self._found.values(), [self.per_trainer, self.per_engine]])

    def _improve(self) -> None:
        """Fits each policy's costs under the slowdown by others, and then the slowdown under these costs."""
        for policy in self._parts:
            for part in self._parts[policy]:
                part.estimate_steps(self._found[policy], self.per_trainer, self.per_engine)
            self._found[policy] = nonnegative(*self._columns(policy))
        slowed = [part.slowed(self._found[policy]) for policy, parts in self._parts.items() for part in parts]
        columns, seconds = (np.concatenate(pieces) for pieces in zip(*slowed, strict=True))
        self.per_trainer, self.per_engine = nonnegative(columns, seconds)

    def _columns(self, policy: str) -> tuple[Floats, Floats]:
        pieces = [part.columns() for part in self._parts[policy]]
        return np.concatenate([columns for columns, _ in pieces]), np.concatenate([seconds for _, seconds in pieces])


class InstanceCalls:
    """The calls of one instance, and the segments between two changes of its batch."""

    def __init__(self, calls: Sequence[Called], slots: int, trainers: "Crowd", engines: "Crowd", own: "Crowd") -> None:
        # Of calls sent at one moment, an earlier group's comes first, as rollout started them.
        calls = sorted(calls, key=lambda call: (call.began, split_trajectory_id(call.trajectory)))
        self._slots = slots
        self._others = (trainers, engines, own)
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
        """Which steps each call was in, if these are the costs; the others' part of that too."""
        joined = self._joined(float(found[0]))
        edges = np.unique(np.concatenate([joined, self._ended]))
        first, last = np.searchsorted(edges, joined), np.searchsorted(edges, self._ended)
        lengths = np.diff(edges)
        size = level(first, last, np.ones(len(joined)), len(lengths))
        kv = level(first, last, self._context + self._sampled / 2, len(lengths))
        prefill = np.bincount(first, self._prompt, minlength=len(edges)).astype(np.float64)[: len(lengths)]
        trainers, engines, own = (crowd.mean(edges) for crowd in self._others)
        others = np.maximum(engines - own, 0.0)
        slow = 1.0 + per_trainer * trainers + per_engine * others
        step = np.maximum((found[1] + found[2] * size + found[3] * kv) * slow, 1e-9)
        steps = np.maximum(lengths - prefill * found[4] * slow, 1e-3 * lengths) / step

        def within(values: Floats) -> Floats:
            total = np.concatenate([[0.0], np.cumsum(values)])
            return total[last] - total[first]

        # As many steps as it sampled tokens.
        share = self._sampled / np.maximum(within(steps), 1e-12)
        in_steps = (np.ones_like(lengths), size, kv)
        self._units = {
            name: np.stack([*(share * within(steps * unit * times) for unit in in_steps), within(prefill * times)], 1)
            for name, times in (("alone", np.ones_like(lengths)), ("trainers", trainers), ("engines", others))
        }
        slowed = self._units["alone"] + per_trainer * self._units["trainers"] + per_engine * self._units["engines"]
        # A call that waited tells nothing of its way: it had arrived, however long that took.
        waited = joined - self._sent - found[0] > 1e-6
        self._way = np.where(waited, 0.0, 1.0)
        self._columns = np.concatenate([self._way[:, None], slowed], axis=1)
        self._took = self._ended - np.where(waited, joined, self._sent)

    def columns(self) -> tuple[Floats, Floats]:
        """Of call_s, decode_s, decode_request_s, decode_kv_s, prefill_token_s; and the seconds they add up to."""
        return self._columns, self._took

    def slowed(self, found: Floats) -> tuple[Floats, Floats]:
        """Of the slowdown per trainer and per other engine; and the seconds that the costs alone do not explain."""
        alone, trainers, engines = (self._units[name] @ found[1:] for name in ("alone", "trainers", "engines"))
        return np.stack([trainers, engines], axis=1), self._took - found[0] * self._way - alone

    def _joined(self, call_s: float) -> Floats:
        """When each call came into the batch: when it had arrived, and one of the slots was free."""
        arrived = np.minimum(self._sent + call_s, self._ended - 1e-6)
        joined, running = arrived.copy(), list[float]()
        for index in np.argsort(arrived, kind="stable"):
            while running and running[0] <= joined[index]:
                heappop(running)
            if len(running) >= self._slots:
                joined[index] = min(max(joined[index], heappop(running)), self._ended[index] - 1e-6)
            heappush(running, float(self._ended[index]))
        return joined


def pauses_of(facts: Facts) -> dict[str, float]:
    """By policy, the median time from an answer to the same trajectory's next call."""
    latest: dict[str, float] = {}
    found: defaultdict[str, list[float]] = defaultdict(list)
    for call in sorted(facts.calls, key=lambda call: call.began):
        before = latest.get(call.trajectory)
        if before is not None and before <= call.began:
            found[call.policy].append(call.began - before)
        latest[call.trajectory] = max(before or 0.0, call.ended)
    return {policy: median(values) for policy, values in found.items()}


def _first_guess(parts: Sequence[InstanceCalls]) -> Floats:
    """Every call alone, and nothing but steps."""
    return np.array([0.0, median(part.pace for part in parts), 0.0, 0.0, 0.0])
