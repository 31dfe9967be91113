"""Decides what the devices of a run take, from its journal: costs under which a simulation replays it.

calls          in fit_engines.py
micro-batches  (micro_batch_s + sample_s rows) x how much others slow the machine

Loads, updates, publications, swaps and moves are what the journal says they took. Devices and their shares are in no
journal and keep their defaults.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from flexmarl.analysis.costs import CostSettings, SharedHost, TrainerCosts
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.fit_engines import EngineFit
from flexmarl.analysis.queues import Crowd
from flexmarl.analysis.regression import Floats, nonnegative, relative_error, rounded
from flexmarl.errors import ConfigError
from flexmarl.events.training_events import MicroBatchDone

ROUNDS = 60
"""Turns between costs and slowdown; there are few micro-batches, and they settle soon."""


class TrainerFit:
    """Costs of accumulating, of all policies at once."""

    def __init__(self, facts: Facts) -> None:
        self._batches: defaultdict[str, list[MicroBatchDone]] = defaultdict(list)
        for batch in facts.micro_batches:
            self._batches[batch.policy].append(batch)
        everyone, engines = Crowd(facts.training().values()), Crowd(facts.serving().values())
        self._beside: dict[str, Floats] = {}
        for policy, batches in self._batches.items():
            edges = [np.array([batch.began, batch.ended]) for batch in batches]
            pairs = [(engines.mean(span)[0], max(0.0, everyone.mean(span)[0] - 1.0)) for span in edges]
            self._beside[policy] = np.array(pairs)
        self.per_engine = self.per_trainer = 0.0
        self._found = {policy: np.zeros(2) for policy in self._batches}
        for _ in range(ROUNDS if self._batches else 0):
            self._improve()

    def costs(self, policy: str) -> TrainerCosts:
        """What was found; a policy that is not trained has the defaults."""
        if policy not in self._found:
            return TrainerCosts()
        batch, sample = map(rounded, self._found[policy])
        return TrainerCosts(micro_batch_s=batch, sample_s=sample)

    def error(self, policy: str) -> float:
        """Relative error of the micro-batches' seconds."""
        if policy not in self._found:
            return 0.0
        return relative_error(self._slowness(policy) * (self._rows(policy) @ self._found[policy]), self._took(policy))

    def _improve(self) -> None:
        for policy in self._batches:
            self._found[policy] = nonnegative(self._slowness(policy)[:, None] * self._rows(policy), self._took(policy))
        alone = {policy: self._rows(policy) @ self._found[policy] for policy in self._batches}
        columns = [alone[policy][:, None] * self._beside[policy] for policy in self._batches]
        seconds = [self._took(policy) - alone[policy] for policy in self._batches]
        self.per_engine, self.per_trainer = nonnegative(np.concatenate(columns), np.concatenate(seconds))

    def _slowness(self, policy: str) -> Floats:
        return 1.0 + self._beside[policy] @ np.array([self.per_engine, self.per_trainer])

    def _rows(self, policy: str) -> Floats:
        return np.array([[1.0, batch.rows] for batch in self._batches[policy]])

    def _took(self, policy: str) -> Floats:
        return np.array([batch.ended - batch.began for batch in self._batches[policy]])


DIRECTIONS = ("resume", "suspend")
LEAST_CALLS = 8
"""Of a policy; five costs are not found from fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well a policy's costs explain what was measured."""

    calls: int
    call_error: float
    """Mean absolute error of a call's seconds, by their mean."""
    micro_batches: int
    micro_batch_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Costs of a run."""

    costs: Mapping[str, CostSettings]
    """By policy."""
    shared_host: SharedHost
    quality: Mapping[str, FitQuality]


def fit_costs(facts: Facts, slots: Mapping[str, int], *, origin: str, pauses: bool = True) -> Fit:
    """Fits every policy of the run; `slots` are those of its instances. Raises ConfigError if there is too little.

    `pauses`: the time between an answer and the next call is the controller's, and counts as on the way of that call;
    False where it is the tools', which a simulation models by themselves.
    """
    calls = Counter[str](call.policy for call in facts.calls)
    for policy in slots:
        if calls[policy] < LEAST_CALLS:
            raise ConfigError(
                f"{origin}: policy '{policy}' has {calls[policy]} calls in steps, and {LEAST_CALLS} are needed to "
                f"fit its costs; give a run with more steps"
            )
    trainers = TrainerFit(facts)
    engines = EngineFit(facts, slots, pauses=pauses)
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


def _loading(facts: Facts, policy: str) -> dict[str, float]:
    """What the journal says as it is: loads, moves and starts of the policy's instances; the rest keeps its default."""
    seen = {
        "load_s": [load.ended - load.began for load in facts.loads if load.policy == policy],
        "move_s": [move.ended - move.began for move in facts.moves if move.to == policy],
        "start_s": [seconds for name, seconds in facts.started.items() if name.policy == policy],
    }
    return {name: rounded(median(values)) for name, values in seen.items() if values}


def _updating(facts: Facts, policy: str) -> dict[str, float]:
    """The same of its trainer. Publishing is what is left of a publication without the longest load in it."""
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
    return {name: rounded(median(values)) for name, values in seen.items() if values}
