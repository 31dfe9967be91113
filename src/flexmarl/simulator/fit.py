"""Decides what the devices of a run take, from its journal: costs under which a simulation replays it.

fit_engines.py fits calls, fit_trainers.py micro-batches; loads, updates, publications, swaps and moves are what the
journal says they took. Devices and their shares are in no journal and keep their defaults.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from flexmarl.errors import ConfigError
from flexmarl.simulator.costs import CostSettings, SharedHost
from flexmarl.simulator.facts import Facts
from flexmarl.simulator.fit_engines import EngineFit
from flexmarl.simulator.fit_trainers import TrainerFit
from flexmarl.simulator.regression import rounded

DIRECTIONS = ("resume", "suspend")
LEAST_CALLS = 8
"""Of a policy; five costs are not found from fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
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
    quality: Mapping[str, Quality]


def fit_costs(facts: Facts, slots: Mapping[str, int], *, origin: str, pauses: bool = True) -> Fit:
    """Fits every policy of the run; `slots` are those of its instances. Raises ConfigError if there is too little.

    `pauses`: the time between an answer and the next call is the controller's, and counts as on the way of that call;
    False where it is the tools', which a simulation models by themselves.
    """
    calls = Counter(call.policy for call in facts.calls)
    for policy in slots:
        if calls[policy] < LEAST_CALLS:
            raise ConfigError(
                f"{origin}: policy '{policy}' has {calls[policy]} calls in steps, and {LEAST_CALLS} are needed to "
                f"fit its costs; give a run with more steps"
            )
    trainers = TrainerFit(facts)
    engines = EngineFit(facts, slots, pauses=pauses)
    batches = Counter(batch.policy for batch in facts.micro_batches)
    costs = {
        policy: CostSettings(
            origin=origin,
            engine=engines.costs(policy).model_copy(update=_loading(facts, policy) | {"slots": slots[policy]}),
            trainer=trainers.costs(policy).model_copy(update=_updating(facts, policy)),
        )
        for policy in slots
    }
    quality = {
        policy: Quality(
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
        "start_s": [seconds for name, seconds in facts.started.items() if name.rsplit("/", 1)[0] == policy],
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
