"""Events of a run as a whole: its commands, its processes, its steps, its checkpoints.

In: nothing. Out: the types that journal, monitor and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.ids import CONTROLLER, GroupId, PolicyName, Version, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A command of the run started."""

    name: ClassVar[str] = "run_started"
    level: str
    """How much is trained: `L0` prompts only, `L1` one shared policy, `L2` adapters, `L3` a model per agent."""
    seed: int
    """The seed of the run."""
    mode: str
    """The setting `pipeline.mode`."""
    release: str
    """When finished groups become ready for training."""
    chat: Mapping[str, str]
    """How the prompts of each policy extend earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """A command continues the run from a checkpoint."""

    name: ClassVar[str] = "resumed"
    step: int
    """Steps done at the checkpoint."""
    versions: Mapping[PolicyName, Version]
    """The version that each policy serves."""
    next_group: GroupId
    """The first new group that is admitted."""
    active: tuple[GroupId, ...]
    """Groups that were active at the checkpoint. They are played again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(Event):
    """The command ended too early; `because` names the error."""

    name: ClassVar[str] = "run_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """The run is to end after the step under way, and to save it; `because` names the signal, or who cancelled it."""

    name: ClassVar[str] = "stop_requested"
    within_s: float
    """The seconds that the step may still take; then the run is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorFailed(Event):
    """The live view failed. The run continues without it."""

    name: ClassVar[str] = "monitor_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(Event):
    """The process of a worker started. If a worker of this name was lost, this is its replacement."""

    name: ClassVar[str] = "process_started"
    process: WorkerId
    """The worker."""
    pid: int
    """Process id."""
    node: str
    """The machine that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(Event):
    """The process of a worker was ended in the middle of the run: its instance moved, retired, or was given up."""

    name: ClassVar[str] = "process_ended"
    process: WorkerId
    """The worker."""
    pid: int
    """Process id."""
    node: str
    """The machine that it ran on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker's process ended without being stopped."""

    name: ClassVar[str] = "worker_lost"
    process: WorkerId
    """The worker."""
    node: str
    """The machine that it ran on."""
    pid: int
    """Process id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """A machine of the cluster does not answer any more. All residents on it are lost."""

    name: ClassVar[str] = "node_lost"
    node: str
    """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """A machine came to the cluster in the middle of the run. Residents may be started on it from now on."""

    name: ClassVar[str] = "node_joined"
    node: str
    """Its name."""
    refused: str = ""
    """Why the run cannot use it; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFetched(Event):
    """A machine of the cluster fetched an object, as a version's weights, from another one. Noticed within seconds."""

    name: ClassVar[str] = "object_fetched"
    node: str
    """The machine that has it now, too."""
    source: str
    """The machine that it came from."""
    object: str
    """Its key, as `weights/solver/3`."""
    base: str = ""
    """The object before it, if parts of it came as their difference from that one (`objects.delta`)."""
    num_bytes: int
    """Its size."""
    sent_bytes: int
    """Bytes that crossed."""
    mismatched_bytes: int = 0
    """Bytes of it that did not come out right from their difference, and crossed whole after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted(Event):
    """A step began."""

    name: ClassVar[str] = "step_started"
    step: int
    """Its number, from 0."""
    versions: Mapping[PolicyName, Version]
    """The version that each policy serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Timed):
    """A step ended."""

    name: ClassVar[str] = "step_ended"
    step: int
    """Its number, from 0."""
    trained: tuple[GroupId, ...]
    """Groups that its updates were made from. They ended with the step."""
    versions: Mapping[PolicyName, Version]
    """The version that each policy serves from now on."""


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


class AlarmKind(StrEnum):
    """A way in which training goes wrong. The rules are in orchestrator/alarms.py."""

    UNTRAINED = "untrained"
    """A policy was not updated for several steps."""
    NO_SPREAD = "no_spread"
    """Groups were dropped because their rewards did not differ."""
    FAILED = "failed"
    """Too many episodes failed."""
    CUT = "cut"
    """Replies of an agent were cut off by `max_tokens`."""
    ENTROPY = "entropy"
    """The entropy of a policy has collapsed."""
    DRIFT = "drift"
    """Trainer and engine give a policy's tokens different probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRaised(Event):
    """The figures of the last steps say that training goes wrong. `because` says the figure."""

    name: ClassVar[str] = "alarm"
    step: int
    """Steps done."""
    alarm: AlarmKind
    """`untrained`, `no_spread`, `failed`, `cut`, `entropy` or `drift`."""
    subject: str = ""
    """The agent or the policy; empty for the team."""
    value: float
    """The figure."""
    limit: float
    """The setting that the figure was compared with."""
    remedy: str
    """Something to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBlocked(Event):
    """User code kept an event loop: no other episode in that process could go on meanwhile."""

    name: ClassVar[str] = "loop_blocked"
    process: WorkerId = CONTROLLER
    """The controller, or the rollout worker."""
    place: str
    """File and line of the user's code, e.g. `team.py:61`."""
    seconds: float
    """How long it did, at least a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Timed):
    """A checkpoint was written to disk."""

    name: ClassVar[str] = "checkpoint"
    step: int
    """Steps done."""
    path: str
    """Its folder."""
    bytes: int
    """Its size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written. The run continues if there is an older one and this was not the last one."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    """Steps done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDropped(Event):
    """An old checkpoint was removed, because of the limits on checkpoints."""

    name: ClassVar[str] = "checkpoint_dropped"
    step: int
    """Steps done at that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBest(Event):
    """A checkpoint is that of the best evaluation so far, and is kept until another one is better."""

    name: ClassVar[str] = "checkpoint_best"
    step: int
    """Steps done at that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEarly(Event):
    """A run ends before its last step, because its evaluations no longer improve."""

    name: ClassVar[str] = "stopped_early"
    step: int
    """Steps done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved(Event):
    """An incomplete checkpoint, left by a killed command, was removed."""

    name: ClassVar[str] = "checkpoint_removed"
    path: str
    """Its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPassedOver(Event):
    """A damaged checkpoint was not used. `because` says what is wrong with it."""

    name: ClassVar[str] = "checkpoint_passed_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePruned(Event):
    """Rows that no checkpoint needs were removed from the store."""

    name: ClassVar[str] = "store_pruned"
    before_group: GroupId
    """The first group that stayed."""
    rows: int
    """How many rows were removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRewound(Event):
    """The store was reset to a checkpoint: groups that are not in the checkpoint are discarded."""

    name: ClassVar[str] = "store_rewound"
    next_group: GroupId
    """The first group that is discarded."""
    replay: tuple[GroupId, ...]
    """Earlier groups that are discarded too, since they were active at the checkpoint."""
    rows: int
    """How many rows were discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStruck(Event):
    """A planned fault happened; only in runs with a fault plan."""

    name: ClassVar[str] = "fault"
    kind: str
    """The kind of fault."""
    target: str
    """The target of the fault: an instance, a policy, a node or a task, depending on the kind."""
    after: float
    """When it was planned: a second or a count, depending on the kind."""
    amount: float
    """How much or how often, depending on the kind."""
    how: str
    """The variant of the kind."""
