"""Decides the costs of a run's devices from its journal, so that a simulation can replay the run.

Calls are fitted in fit_engines.py. Micro-batches are fitted here (`TrainerFit`):

    seconds of a micro-batch    (micro_batch_s + sample_s rows) x slowdown by others on the machine

Loads, updates, publications, swaps, moves and starts are not fitted: their cost is the median of their times in the
journal. A trainer that was never swapped kept its devices, so that its swaps cost nothing. No journal has the number of
devices or their `busy_share`: these keep their defaults.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from flexmarl.analysis.conversations import CalledTool
from flexmarl.analysis.costs import CostSettings, SharedHost, TrainerCosts
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.fit_engines import EngineFit, identified, nonnegative, relative_error, rounded, slowdowns
from flexmarl.analysis.queues import BusyCount, Floats
from flexmarl.errors import ConfigError
from flexmarl.events.training_events import MicroBatchDone

ROUNDS = 60
"""How often costs and slowdown are fitted in turns. There are few micro-batches, and their costs settle soon."""


class TrainerFit:
    """Fits the accumulation costs of all policies together, since they share the machine."""

    def __init__(self, facts: Facts) -> None:
        self._batches: defaultdict[str, list[MicroBatchDone]] = defaultdict(list)
        for batch in facts.micro_batches:
            self._batches[batch.policy].append(batch)
        trainers, engines = BusyCount(facts.training().values()), BusyCount(facts.serving().values())
        self._concurrent: dict[str, Floats] = {}
        for policy, batches in self._batches.items():
            spans = [(batch.began, batch.ended) for batch in batches]
            others = np.maximum(trainers.during(spans) - 1.0, 0.0)
            self._concurrent[policy] = np.stack([engines.during(spans), others], axis=1)
        self.per_engine = self.per_trainer = 0.0
        self._found = {policy: np.zeros(2) for policy in self._batches}
        if self._batches:
            self._identified = identified(np.concatenate([*self._concurrent.values()]))
            for _ in range(ROUNDS):
                self._improve()

    def costs(self, policy: str) -> TrainerCosts:
        """Returns the fitted costs of a policy; the defaults if it is not trained."""
        if policy not in self._found:
            return TrainerCosts()
        batch, sample = map(rounded, self._found[policy])
        return TrainerCosts(micro_batch_s=batch, sample_s=sample)

    def error(self, policy: str) -> float:
        """Relative error of the fitted seconds of the policy's micro-batches; 0 if it is not trained."""
        if policy not in self._found:
            return 0.0
        return relative_error(self._slowness(policy) * (self._rows(policy) @ self._found[policy]), self._took(policy))

    def _improve(self) -> None:
        for policy in self._batches:
            self._found[policy] = nonnegative(self._slowness(policy)[:, None] * self._rows(policy), self._took(policy))
        alone = {policy: self._rows(policy) @ self._found[policy] for policy in self._batches}
        columns = [alone[policy][:, None] * self._concurrent[policy] for policy in self._batches]
        seconds = [self._took(policy) - alone[policy] for policy in self._batches]
        self.per_engine, self.per_trainer = slowdowns(
            np.concatenate(columns), np.concatenate(seconds), self._identified
        )

    def _slowness(self, policy: str) -> Floats:
        return 1.0 + self._concurrent[policy] @ np.array([self.per_engine, self.per_trainer])

    def _rows(self, policy: str) -> Floats:
        return np.array([[1.0, batch.rows] for batch in self._batches[policy]])

    def _took(self, policy: str) -> Floats:
        return np.array([batch.ended - batch.began for batch in self._batches[policy]])


DIRECTIONS = ("resume", "suspend")
LEAST_CALLS = 8
"""Fewest calls of a policy from which its five costs can be fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well a policy's costs explain what was measured."""

    calls: int
    call_error: float
    """Mean absolute error of the seconds of a call, divided by their mean."""
    micro_batches: int
    micro_batch_error: float
    """The same for micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted costs of a run."""

    costs: Mapping[str, CostSettings]
    """Costs by policy."""
    shared_host: SharedHost
    quality: Mapping[str, FitQuality]
    """Errors of the fit by policy."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Twins of tools by name, as `simulation.tools` takes them."""

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors of the fit of the seconds of the run, by what took them."""
        calls = {f"calls of '{policy}'": one.call_error for policy, one in self.quality.items()}
        return calls | {f"micro-batches of '{policy}'": one.micro_batch_error for policy, one in self.quality.items()}


def fit_costs(facts: Facts, slots: Mapping[str, int], *, origin: str, tool_s: Mapping[str, float] | None = {}) -> Fit:
    """Fits every policy of the run. Raises ConfigError if a policy has fewer than LEAST_CALLS calls.

    `slots` gives the slots of an instance, by policy; `tool_s` the seconds of tools before a call, by request. The rest
    of the time between an answer and the next call is the controller's: it is added to `call_s`. `tool_s` None: tools
    took time, nobody knows how much, and nothing is added.
    """
    calls = Counter[str](call.policy for call in facts.calls)
    for policy in slots:
        if calls[policy] < LEAST_CALLS:
            raise ConfigError(
                f"{origin}: policy '{policy}' has {calls[policy]} calls in steps, and {LEAST_CALLS} are needed to "
                f"fit its costs; give a run with more steps"
            )
    trainers = TrainerFit(facts)
    engines = EngineFit(facts, slots, tool_s)
    batches = Counter[str](batch.policy for batch in facts.micro_batches)
    costs = {
        policy: CostSettings(
            origin=origin,
            engine=engines.costs(policy).model_copy(update=_loading(facts, policy) | {"slots": slots[policy]}),
            trainer=trainers.costs(policy).model_copy(update=_updating(facts, policy)),
        )
        for policy in slots
    }
    quality = {
        policy: FitQuality(
            calls=calls[policy],
            call_error=engines.error(policy),
            micro_batches=batches[policy],
            micro_batch_error=trainers.error(policy),
        )
        for policy in slots
    }
    host = SharedHost(
        engine_per_trainer=rounded(engines.per_trainer),
        engine_per_engine=rounded(engines.per_engine),
        trainer_per_engine=rounded(trainers.per_engine),
        trainer_per_trainer=rounded(trainers.per_trainer),
    )
    return Fit(costs=costs, shared_host=host, quality=quality)


def fit_tools(messages: Iterable[Sequence[CalledTool]]) -> dict[str, dict[str, Any]]:
    """Fits twins to the calls of recorded messages, by tool: a lognormal latency, and a result of middle length.

    Calls of a message run at once: each is taken to last as long as all of them. Those at fault, most of which end at
    once, and those that were not run are left out. A tool whose results no agent read has none.
    """
    found: defaultdict[str, list[tuple[str | None, float]]] = defaultdict(list)
    for call in (call for message in messages for call in message):
        run = call.seconds > 0 if call.result is None else not call.result.startswith("error: ")
        if call.name and run:
            found[call.name].append(("" if call.prompt else call.result, max(call.seconds, 1e-6)))
    return {name: _twin(*zip(*calls, strict=True)) for name, calls in found.items()}


def _twin(results: Sequence[str | None], seconds: Sequence[float]) -> dict[str, Any]:
    sigma = float(np.log(seconds).std())
    numbers = {"mean": float(np.mean(seconds)), "sigma": sigma, "floor": min(seconds), "cap": max(seconds)}
    latency_s = {"shape": "lognormal"} | {name: rounded(number) for name, number in numbers.items()}
    read = sorted((result for result in results if result is not None), key=len)
    return {"latency_s": latency_s} | ({"result": read[len(read) // 2]} if read else {})


def _loading(facts: Facts, policy: str) -> dict[str, float]:
    """Median seconds of loads, moves and starts of the policy's instances. Costs without an event are left out."""
    seen = {
        "load_s": [load.ended - load.began for load in facts.loads if load.policy == policy],
        "move_s": [move.ended - move.began for move in facts.moves if move.to == policy and not move.starts],
        "start_s": [seconds for name, seconds in facts.started.items() if name.policy == policy],
    }
    return {name: rounded(median(values)) for name, values in seen.items() if values}


def _updating(facts: Facts, policy: str) -> dict[str, float]:
    """The same for updates, publications and swaps of its trainer.

    The cost of publishing is the time of a publication less the longest load in it.
    """
    loads: defaultdict[int, float] = defaultdict(float)
    for load in facts.loads:
        if load.policy == policy:
            loads[load.version] = max(loads[load.version], load.ended - load.began)
    swaps = {name: [s for s in facts.swaps if (s.policy, s.direction) == (policy, name)] for name in DIRECTIONS}
    seen = {
        "update_s": [update.ended - update.began for update in facts.updates if update.policy == policy],
        "publish_s": [
            max(0.0, one.ended - one.began - loads[one.version]) for one in facts.publications if one.policy == policy
        ],
    } | {f"{name}_s": [swap.ended - swap.began for swap in found] for name, found in swaps.items()}
    if seen["update_s"]:  # It was trained without a swap: its trainer kept the devices.
        seen |= {name: [0.0] for name in ("resume_s", "suspend_s") if not seen[name]}
    return {name: rounded(median(values)) for name, values in seen.items() if values}
