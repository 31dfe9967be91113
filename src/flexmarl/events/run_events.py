"""Events of a run as a whole: its commands, its processes, its steps, its checkpoints.

In: nothing. Out: the types that journal, monitor and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.ids import GroupId, PolicyName, Version, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A command began to work on the run."""

    name: ClassVar[str] = "run_started"
    level: str
    """How much is trained: `L0` prompts only, `L1` one shared policy, `L2` adapters, `L3` a model per agent."""
    seed: int
    """The seed of the run."""
    mode: str
    """`pipeline.mode`."""
    release: str
    """When finished groups become ready for training."""
    chat: Mapping[str, str]
    """By policy, how its prompts extend earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A command goes on from a checkpoint."""

    name: ClassVar[str] = "resumed"
    step: int
    """Steps done."""
    versions: Mapping[PolicyName, Version]
    """What every policy serves."""
    next_group: GroupId
    """The first group that is admitted anew."""
    active: tuple[GroupId, ...]
    """Groups that were active at the checkpoint, and are played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(Event):
    """The command ended too early; `because` names the error."""

    name: ClassVar[str] = "run_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorFailed(Event):
    """The live view failed; the run went on without it."""

    name: ClassVar[str] = "monitor_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(Event):
    """A worker runs; under a name that was lost, it is a replacement."""

    name: ClassVar[str] = "process_started"
    process: WorkerId
    """The worker."""
    pid: int
    """Its process."""
    node: str
    """The machine that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker's process ended, and nobody had stopped it."""

    name: ClassVar[str] = "worker_lost"
    process: WorkerId
    """The worker."""
    node: str
    """The machine that it ran on."""
    pid: int
    """Its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted(Event):
    """A step began."""

    name: ClassVar[str] = "step_started"
    step: int
    """Its number, from 0."""
    versions: Mapping[PolicyName, Version]
    """What every policy serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Timed):
    """A step is done."""

    name: ClassVar[str] = "step_ended"
    step: int
    """Its number, from 0."""
    trained: tuple[GroupId, ...]
    """Groups that went into its updates, and ended with it."""
    versions: Mapping[PolicyName, Version]
    """What every policy serves from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Timed):
    """Held-out tasks were played."""

    name: ClassVar[str] = "evaluated"
    when: str
    """`before`, `between` or `after` training."""
    step: int
    """Steps done."""
    evaluation: Mapping[str, Any]
    """Versions, episodes, failed episodes, means of metrics and rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Timed):
    """A checkpoint is on disk."""

    name: ClassVar[str] = "checkpoint"
    step: int
    """Steps done."""
    path: str
    """Its folder."""
    bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; the run goes on if an older one is there."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    """Steps done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDropped(Event):
    """An old checkpoint was removed to keep to the limits."""

    name: ClassVar[str] = "checkpoint_dropped"
    step: int
    """Steps that it had done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """What a killed command left of a checkpoint was removed."""

    name: ClassVar[str] = "checkpoint_removed"
    path: str
    """Its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPassedOver(Event):
    """A damaged checkpoint was not used; `because` says what is wrong with it."""

    name: ClassVar[str] = "checkpoint_passed_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePruned(Event):
    """Rows that no checkpoint needs were removed from the store."""

    name: ClassVar[str] = "store_pruned"
    before_group: GroupId
    """The first group that stayed."""
    rows: int
    """How many rows went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRewound(Event):
    """The store was taken back to a checkpoint: groups of which it knows nothing are discarded."""

    name: ClassVar[str] = "store_rewound"
    next_group: GroupId
    """The first group that is discarded."""
    replay: tuple[GroupId, ...]
    """Earlier groups that are discarded too, since they were active."""
    rows: int
    """How many rows were discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck(Event):
    """A planned fault struck; only in runs with a fault plan."""

    name: ClassVar[str] = "fault"
    kind: str
    """What went wrong."""
    target: str
    """Whom it befell: an instance, a policy, a node or a task, by kind."""
    after: float
    """When it was planned: a second or a count, by kind."""
    amount: float
    """How much or how often, by kind."""
    how: str
    """Which variant of the kind."""
