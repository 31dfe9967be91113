"""Decides what goes wrong in a run: a plan of faults, drawn at random or read from a file.

    targets = Targets(instances=(InstanceId("solver", 0),), trained=("solver",), groups=2, steps=3)
    draw_plan(random.Random(7), targets).faults  # a slow instance and a poisoned task, say

A plan is data; `injection.py` carries it out. Each fault strikes once, in the first life of the run in which it comes
due. A fault of tasks or of the task source strikes whenever such a task is played or asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from flexmarl.config.load import parse_yaml
from flexmarl.errors import ConfigError, boundary
from flexmarl.records import InstanceId, PolicyName


class FaultKind(StrEnum):
    """The kinds of faults. Brackets say what `Fault.target` and `Fault.after` are; - where one is not used."""

    LOST_INSTANCE = "lost_instance"
    """An engine dies. By `how`, its next call fails, or its process is seen to end at once (instance, seconds)."""
    LOST_NODE = "lost_node"
    """A node dies, and with it every engine, trainer and rollout worker on it (node, seconds)."""
    LOST_WORKER = "lost_worker"
    """A rollout worker dies, and with it the episodes that it plays (worker, seconds)."""
    SLOW_INSTANCE = "slow_instance"
    """Tokens of an engine take `amount` times as long (instance, seconds)."""
    ENGINE_SILENCE = "engine_silence"
    """An engine stops answering all calls (instance, seconds)."""
    ENGINE_ERRORS = "engine_errors"
    """`amount` requests of a policy, from number `after` on, end as errors (policy, requests)."""
    FAILED_PUBLISH = "failed_publish"
    """An instance refuses load number `after`, or reports the checksum of other bytes, by `how` (instance, loads)."""
    LOST_TRAINER = "lost_trainer"
    """A trainer dies halfway through micro-batch number `after` (policy, micro-batches)."""
    LOST_CACHE = "lost_cache"
    """A trainer loses its gradient sums after micro-batch number `after` (policy, micro-batches)."""
    CLOCK_SKEW = "clock_skew"
    """From micro-batch number `after` on, a trainer's durations are off by `amount` seconds (policy, micro-batches)."""
    STORE_FAILURE = "store_failure"
    """The store refuses write number `after` (-, writes)."""
    LOST_CONTROLLER = "lost_controller"
    """The controller dies as by kill -9, by `how` at a second or after a write to the store (-, seconds or writes)."""
    TORN_CHECKPOINT = "torn_checkpoint"
    """The newest checkpoint is damaged when the run has died; `how` says in what way (-, -)."""
    HUNG_WORKFLOW = "hung_workflow"
    """The first play of a task never ends by itself (input id, -)."""
    POISON_TASK = "poison_task"
    """Every play of a task fails (input id, -)."""
    ALL_FILTERED = "all_filtered"
    """`amount` tasks from position `after` on teach nothing: all their rewards are equal (-, tasks)."""
    SOURCE_EXHAUSTED = "source_exhausted"
    """The source has only `after` tasks (-, tasks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A single fault. Counts begin anew with each life of the run; seconds are those of the event loop."""

    kind: FaultKind
    target: str = ""
    """Name of a policy, node or worker, input id of a task, or an InstanceId; empty where only one can be meant."""
    after: float = 0.0
    """When the fault comes due, as the kind says: seconds, a count from 1, or a position or number of tasks."""
    amount: float = 0.0
    """How strong or how long the fault is, where the kind says so."""
    how: str = ""
    """The variety, where a kind has several: one of `HOW`."""

    @property
    def instance(self) -> InstanceId:
        """The instance that it strikes. Raises ValueError if its target is not an instance."""
        if not isinstance(self.target, InstanceId):
            raise ValueError(f"'{self.kind}' strikes {self.target!r}, which is no InstanceId")
        return self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """All faults of one run."""

    faults: tuple[Fault, ...] = ()

    def of(self, *kinds: FaultKind) -> tuple[Fault, ...]:
        """Returns the faults of these kinds, in the plan's order."""
        return tuple(fault for fault in self.faults if fault.kind in kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The parts and sizes of a run, from which faults are drawn."""

    instances: tuple[InstanceId, ...]
    trained: tuple[PolicyName, ...]
    """Policies with a trainer."""
    groups: int
    """Groups in a step."""
    steps: int
    step_s: float = 3.0
    """About how long a step takes. Faults that come by time are drawn within the run."""
    step_calls: int = 60
    """About how many calls of the store a step makes."""
    input_id: str = "task-{}"
    """Template of a task's input id; `{}` is its position."""


TORN = ("truncated", "flipped", "unsealed", "half_written")
"""How a checkpoint is damaged: a file is cut short, a byte differs, the manifest is missing, it has no final name."""


def draw_plan(random: Random, targets: Targets, *, most: int = 4) -> FaultPlan:
    """Draws one to `most` faults. To a torn checkpoint it adds a late death of the controller, so that a life ends."""
    kinds = random.sample(DRAWN, random.randint(1, most))
    faults = [draw_fault(kind, random, targets) for kind in kinds]
    if FaultKind.TORN_CHECKPOINT in kinds:
        late = random.uniform(1.0, targets.steps)  # Usually after the first checkpoint was written.
        faults.append(Fault(kind=FaultKind.LOST_CONTROLLER, after=int(late * targets.step_calls), how="store_calls"))
    return FaultPlan(faults=tuple(faults))


def draw_fault(kind: FaultKind, random: Random, targets: Targets) -> Fault:
    """Draws the target, time and variety of one fault of a kind."""
    return _DRAWS[kind](random, targets, kind)


def _in_time(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    instance = random.choice(targets.instances)
    after = random.uniform(0.0, targets.steps * targets.step_s)
    return Fault(kind=kind, target=instance, after=after, amount=random.choice([3.0, 20.0]))


def _of_a_loss(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    return replace(_in_time(random, targets, kind), how=random.choice(["by_call", "at_once"]))


def _of_requests(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    policy = random.choice(targets.instances).policy
    return Fault(kind=kind, target=policy, after=random.randint(1, 20), amount=random.choice([1.0, 3.0, 12.0]))


def _of_loads(random: Random, targets: Targets, kind: FaultKind) -> Fault:
    mine = [instance for instance in targets.instances if instance.policy in targets.trained]
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


BY_INSTANCE = (FaultKind.LOST_INSTANCE, FaultKind.SLOW_INSTANCE, FaultKind.ENGINE_SILENCE, FaultKind.FAILED_PUBLISH)
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
"""Kinds that any random run can have."""
PLACED = (FaultKind.LOST_WORKER, FaultKind.LOST_NODE)
"""Kinds that only random runs on several nodes have, whose episodes are played by rollout workers."""


def draw_placed(random: Random, targets: Targets, *, workers: Sequence[str], nodes: Sequence[str]) -> tuple[Fault, ...]:
    """Draws losses of one or two workers, one of which may be that of a node. A third may fail an episode."""
    many = [(FaultKind.LOST_WORKER, random.choice(workers))]
    kind = random.choice([None, FaultKind.LOST_WORKER, FaultKind.LOST_NODE])
    if kind is not None:
        many.append((kind, random.choice(nodes if kind is FaultKind.LOST_NODE else workers)))
    run_s = targets.steps * targets.step_s
    return tuple(Fault(kind=kind, target=target, after=random.uniform(0.0, run_s)) for kind, target in many)


def read_plan(path: Path) -> FaultPlan:
    """Reads a plan from a YAML or JSON file: a list of faults, or a mapping with the list under `faults`.

    Raises ConfigError naming the file, the fault's place in the list, and the field.
    """
    with boundary(ConfigError, f"--faults {path}"):
        content = parse_yaml(path.read_text(encoding="utf-8"))
    faults = content.get("faults") if isinstance(content, dict) and set(content) == {"faults"} else content
    if not isinstance(faults, list):
        raise ConfigError(f"{path}: a plan is a list of faults under the key `faults`, got {content!r:.100}")
    return FaultPlan(faults=tuple(_fault(f"{path}: faults[{place}]", one) for place, one in enumerate(faults)))


def _fault(where: str, fields: Any) -> Fault:
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{where}: a fault is a mapping like {{kind: lost_instance, target: solver/0}}, got {fields!r:.60}"
        )
    if unknown := set(fields) - set(_FIELDS):
        raise ConfigError(f"{where}.{min(unknown, key=str)}: there is no such field; use {', '.join(_FIELDS)}")
    kinds = [kind.value for kind in FaultKind]
    if fields.get("kind") not in kinds:
        raise ConfigError(f"{where}.kind: there is no kind {fields.get('kind')!r}; use one of {', '.join(kinds)}")
    kind = FaultKind(fields["kind"])
    values = {name: _value(f"{where}.{name}", kind, name, value) for name, value in fields.items()}
    how = HOW.get(kind, ("",))
    if values.setdefault("how", how[0]) not in how:
        raise ConfigError(f"{where}.how: '{kind}' has no '{values['how']}'; use {', '.join(map(repr, how))}")
    if kind in TARGETED and not values.get("target"):
        raise ConfigError(f"{where}.target is missing: '{kind}' needs {TARGETED[kind]}")
    if kind in MEASURED and "amount" not in values:
        raise ConfigError(f"{where}.amount is missing: '{kind}' needs {MEASURED[kind]}")
    if kind is FaultKind.SLOW_INSTANCE and values["amount"] <= 1:
        raise ConfigError(f"{where}.amount must be more than 1, got {values['amount']:g}: it needs {MEASURED[kind]}")
    if kind in BY_INSTANCE:
        try:
            values["target"] = InstanceId.parse(values["target"])
        except ValueError as error:
            raise ConfigError(f"{where}.target: {error}") from None
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
"""The varieties of kinds that have several. The first is the default of a plan in a file."""
TARGETED: Mapping[FaultKind, str] = {
    FaultKind.LOST_NODE: "a node, as in simulated-0",
    FaultKind.LOST_WORKER: "a rollout worker, as in rollout/0",
    **dict.fromkeys(BY_INSTANCE, "an instance, as in solver/0"),
    **dict.fromkeys(BY_POLICY, "a policy"),
    **dict.fromkeys(BY_TASK, "the input id of a task"),
}
"""Kinds whose `target` must be given, and what it must name."""
MEASURED: Mapping[FaultKind, str] = {
    FaultKind.SLOW_INSTANCE: "how many times as long tokens take, as in 3",
    FaultKind.ENGINE_ERRORS: "how many requests end as errors, as in 2",
    FaultKind.CLOCK_SKEW: "the seconds by which durations are off, as in 0.5",
    FaultKind.ALL_FILTERED: "how many tasks teach nothing, as in 4",
}
"""Kinds whose `amount` must be given, and what it says."""
