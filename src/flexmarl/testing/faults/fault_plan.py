"""Decides what goes wrong in a run: a plan of faults, drawn from a seed.

    targets = Targets(instances=("solver/0", "solver/1"), trained=("solver",), groups=2, steps=3)
    draw_plan(random.Random(7), targets).faults  # a slow instance and a poisoned task, say

A plan is data; `injection.py` carries it out. Each fault strikes once, in the first life of the run in which it comes
due; those of tasks strike whenever their task is played.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from flexmarl.config.yaml_text import parse_yaml
from flexmarl.errors import ConfigError, boundary


class FaultKind(StrEnum):
    """What can go wrong; in brackets what `Fault.target`, `after` and `amount` are."""

    LOST_INSTANCE = "lost_instance"
    """Its engine dies; its next call says so, or its process at once, by `how` (instance, seconds)."""
    LOST_NODE = "lost_node"
    """A node dies, and with it every engine and trainer on it (node, seconds)."""
    SLOW_INSTANCE = "slow_instance"
    """Its tokens take `amount` times as long (instance, seconds)."""
    ENGINE_SILENCE = "engine_silence"
    """Its engine never answers again, to no call at all (instance, seconds)."""
    ENGINE_ERRORS = "engine_errors"
    """From request number `after` on, `amount` requests of a policy end as errors (policy, requests)."""
    FAILED_PUBLISH = "failed_publish"
    """Load number `after` of an instance is refused, or comes out as other bytes, by `how` (instance, loads)."""
    LOST_TRAINER = "lost_trainer"
    """It dies in the midst of micro-batch number `after` (policy, micro-batches)."""
    LOST_CACHE = "lost_cache"
    """It dies between micro-batch number `after` and the update, and its gradient sums with it (policy, same)."""
    CLOCK_SKEW = "clock_skew"
    """From micro-batch number `after` on, what a trainer measures is `amount` seconds off (policy, same)."""
    STORE_FAILURE = "store_failure"
    """Write number `after` of the store is refused (nothing, writes)."""
    LOST_CONTROLLER = "lost_controller"
    """The run is over like after kill -9, at second or store call number `after`, by `how` (nothing, see there)."""
    TORN_CHECKPOINT = "torn_checkpoint"
    """When the run has died, its newest checkpoint is not whole any more, by `how` (nothing, nothing)."""
    HUNG_WORKFLOW = "hung_workflow"
    """The first play of a task never ends by itself (input id, nothing)."""
    POISON_TASK = "poison_task"
    """Every play of a task fails (input id, nothing)."""
    ALL_FILTERED = "all_filtered"
    """`amount` tasks from position `after` on teach nothing: all their rewards are equal (nothing, tasks)."""
    SOURCE_EXHAUSTED = "source_exhausted"
    """There are only `after` tasks (nothing, tasks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong. Seconds and counts begin anew with each life of the run."""

    kind: FaultKind
    target: str = ""
    """What it befalls: an instance, a policy, a task's input id; empty where there is only one."""
    after: float = 0.0
    """When it comes due: seconds, or a count from 1, as the kind says."""
    amount: float = 0.0
    how: str = ""
    """The variety, where a kind has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """All that goes wrong in one run."""

    faults: tuple[Fault, ...] = ()

    def of(self, *kinds: FaultKind) -> tuple[Fault, ...]:
        """The faults of these kinds, in the plan's order."""
        return tuple(fault for fault in self.faults if fault.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What there is to befall."""

    instances: tuple[str, ...]
    """As the pool names them."""
    trained: tuple[str, ...]
    """Policies with a trainer."""
    groups: int
    """Per step."""
    steps: int
    step_s: float = 3.0
    """About how long a step takes: faults by time strike within the run."""
    step_calls: int = 60
    """About how often a step calls the store."""
    input_id: str = "task-{}"
    """Of the task at a position."""


TORN = ("truncated", "flipped", "unsealed", "half_written")
"""A file is shorter than written; one of its bytes differs; the manifest is missing; it never got its final name."""


def draw_plan(random: Random, targets: Targets, *, most: int = 4) -> FaultPlan:
    """One to `most` faults; a checkpoint is torn only where something ends a life, late."""
    kinds = random.sample(DRAWN, random.randint(1, most))
    faults = [draw_fault(kind, random, targets) for kind in kinds]
    if FaultKind.TORN_CHECKPOINT in kinds:
        late = random.uniform(1.0, targets.steps)  # Mostly after the first one was written.
        faults.append(Fault(kind=FaultKind.LOST_CONTROLLER, after=int(late * targets.step_calls), how="store_calls"))
    return FaultPlan(faults=tuple(faults))


def draw_fault(kind: FaultKind, random: Random, targets: Targets) -> Fault:
    """One fault of a kind: whom it befalls, when, and how."""
    return _DRAWS[kind](random, targets, kind)


def _in_time(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    instance = random.choice(targets.instances)
    after = random.uniform(0.0, targets.steps * targets.step_s)
    return Fault(kind=kind, target=instance, after=after, amount=random.choice([3.0, 20.0]))


def _of_a_loss(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return replace(_in_time(random, targets, kind), how=random.choice(["by_call", "at_once"]))


def _of_requests(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    policy = random.choice(targets.instances).rpartition("/")[0]
    return Fault(kind=kind, target=policy, after=random.randint(1, 20), amount=random.choice([1.0, 3.0, 12.0]))


def _of_loads(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    mine = [name for name in targets.instances if name.rpartition("/")[0] in targets.trained]
    how = random.choice(["refused", "other_bytes"])
    return Fault(kind=kind, target=random.choice(mine), after=random.randint(1, targets.steps), how=how)


def _of_micro_batches(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    amount = random.choice([-40.0, 0.3, 90.0]) if kind is FaultKind.CLOCK_SKEW else 0.0
    return Fault(kind=kind, target=random.choice(targets.trained), after=random.randint(1, 6), amount=amount)


def _of_the_store(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return Fault(kind=kind, after=random.randint(1, targets.steps * targets.step_calls))


def _of_the_controller(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    if random.random() < 0.5:
        return Fault(kind=kind, after=random.uniform(0.0, targets.steps * targets.step_s), how="seconds")
    return Fault(kind=kind, after=random.randint(1, targets.steps * targets.step_calls), how="store_calls")


def _of_a_checkpoint(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return Fault(kind=kind, how=random.choice(TORN))


def _of_a_task(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    position = random.randrange(targets.steps * targets.groups)
    return Fault(kind=kind, target=targets.input_id.format(position))


def _of_a_step(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return Fault(kind=kind, after=random.randrange(targets.steps) * targets.groups, amount=targets.groups)


def _of_the_source(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return Fault(kind=kind, after=random.randrange(targets.steps * targets.groups))


BY_INSTANCE = (
    FaultKind.LOST_INSTANCE,
    FaultKind.SLOW_INSTANCE,
    FaultKind.ENGINE_SILENCE,
    FaultKind.FAILED_PUBLISH,
)
BY_POLICY = (FaultKind.ENGINE_ERRORS, FaultKind.LOST_TRAINER, FaultKind.LOST_CACHE, FaultKind.CLOCK_SKEW)
BY_TASK = (FaultKind.HUNG_WORKFLOW, FaultKind.POISON_TASK)
_DRAWS: Mapping[FaultKind, Callable[[Random, Targets, FaultKind], Fault]] = {
    FaultKind.LOST_INSTANCE: _of_a_loss,
    FaultKind.SLOW_INSTANCE: _in_time,
    FaultKind.ENGINE_SILENCE: _in_time,
    FaultKind.ENGINE_ERRORS: _of_requests,
    FaultKind.FAILED_PUBLISH: _of_loads,
    FaultKind.LOST_TRAINER: _of_micro_batches,
    FaultKind.LOST_CACHE: _of_micro_batches,
    FaultKind.CLOCK_SKEW: _of_micro_batches,
    FaultKind.STORE_FAILURE: _of_the_store,
    FaultKind.LOST_CONTROLLER: _of_the_controller,
    FaultKind.TORN_CHECKPOINT: _of_a_checkpoint,
    FaultKind.HUNG_WORKFLOW: _of_a_task,
    FaultKind.POISON_TASK: _of_a_task,
    FaultKind.ALL_FILTERED: _of_a_step,
    FaultKind.SOURCE_EXHAUSTED: _of_the_source,
}

DRAWN = tuple(kind for kind in FaultKind if kind in _DRAWS)
"""Kinds that random runs meet: those of a run on one node."""


def read_plan(path: Path) -> FaultPlan:
    """Reads a plan from a YAML or JSON file: a list of faults, or a mapping with the list under `faults`.

    Raises ConfigError naming the file, the fault's place in the list, and the field.
    """
    with boundary(ConfigError, f"--faults {path}"):
        said = parse_yaml(path.read_text(encoding="utf-8"))
    faults = said.get("faults") if isinstance(said, dict) and set(said) == {"faults"} else said
    if not isinstance(faults, list):
        raise ConfigError(f"{path}: a plan is a list of faults under the key `faults`, got {said!r:.100}")
    return FaultPlan(faults=tuple(_fault(f"{path}: faults[{place}]", one) for place, one in enumerate(faults)))


def _fault(where: str, said: Any) -> Fault:
    if not isinstance(said, dict):
        raise ConfigError(
            f"{where}: a fault is a mapping like {{kind: lost_instance, target: solver/0}}, got {said!r:.60}"
        )
    if unknown := set(said) - set(_FIELDS):
        raise ConfigError(f"{where}.{min(unknown, key=str)}: there is no such field; use {', '.join(_FIELDS)}")
    kinds = [kind.value for kind in FaultKind]
    if said.get("kind") not in kinds:
        raise ConfigError(f"{where}.kind: there is no kind {said.get('kind')!r}; use one of {', '.join(kinds)}")
    kind = FaultKind(said["kind"])
    values = {name: _value(f"{where}.{name}", kind, name, value) for name, value in said.items()}
    how = HOW.get(kind, ("",))
    if values.setdefault("how", how[0]) not in how:
        raise ConfigError(f"{where}.how: '{kind}' has no '{values['how']}'; use {', '.join(map(repr, how))}")
    if kind in TARGETED and not values.get("target"):
        raise ConfigError(f"{where}.target is missing: '{kind}' needs {TARGETED[kind]}")
    return Fault(**values)


def _value(where: str, kind: FaultKind, name: str, value: Any) -> Any:
    if name == "kind":
        return kind
    if name not in _NUMBERS:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: it must be a text, got {value!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: it must be a number, got {value!r}")
    if not math.isfinite(value) or (value < 0 and kind is not FaultKind.CLOCK_SKEW):
        raise ConfigError(f"{where}: it must be at least 0, got {value}")
    return float(value)


_FIELDS = ("kind", "target", "after", "amount", "how")
_NUMBERS = ("after", "amount")
HOW: Mapping[FaultKind, tuple[str, ...]] = {
    FaultKind.LOST_INSTANCE: ("at_once", "by_call"),
    FaultKind.FAILED_PUBLISH: ("refused", "other_bytes"),
    FaultKind.LOST_CONTROLLER: ("seconds", "store_calls"),
    FaultKind.TORN_CHECKPOINT: TORN,
}
"""The varieties of kinds that have several; the first is meant where a plan in a file names none."""
TARGETED: Mapping[FaultKind, str] = {
    FaultKind.LOST_NODE: "a node, as in simulated-0",
    **dict.fromkeys(BY_INSTANCE, "an instance, as in solver/0"),
    **dict.fromkeys(BY_POLICY, "a policy"),
    **dict.fromkeys(BY_TASK, "the input id of a task"),
}
"""What must be named of the kinds that befall one of several."""
