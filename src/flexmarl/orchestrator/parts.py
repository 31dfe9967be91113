"""Parts of one run, which `assemble` makes and the orchestrator joins; and the classes of rules that tests replace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flexmarl.events.event import Events
from flexmarl.experience.window import Window
from flexmarl.inference.pool import InferencePool
from flexmarl.orchestrator.checkpoint import Checkpoints
from flexmarl.orchestrator.collect import Collector, Crediting
from flexmarl.orchestrator.evaluation import Evaluator
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.publish import Gate, Publisher, Updates
from flexmarl.orchestrator.saving import Prune
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import PolicyName
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.rollout import Rollout
from flexmarl.training.interface import Trainer
from flexmarl.training.session import TrainingSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Classes from which a run is wired. The defaults are those of production; tests of the laws use a broken one."""

    admission: type[Admission] = Admission
    window: type[Window] = Window
    gate: type[Gate] = Gate
    rollout: type[Rollout] = Rollout


PRODUCTION = Rules()
"""The rules of every real run."""


def _ignore(warning: str) -> None:
    pass


class Balances(Protocol):
    """A balancer: moves instances between policies during a run."""

    async def watch(self) -> None:
        """Moves instances until it is cancelled. Its failure ends the run."""
        ...

    def rollout_ended(self, *, pauses: bool = True) -> None:
        """Called at the end of a step's rollout. If rollout `pauses`, the rest of training hides the moves."""
        ...


class Suspends(Protocol):
    """The owner of the training devices, which can release them all."""

    async def suspend_all(self) -> None:
        """Suspends every policy's training; returns when no policy holds a device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All parts of one run."""

    feed: Feed
    admission: Admission
    rollout: Rollout
    crediting: Crediting
    collector: Collector
    trainers: Mapping[PolicyName, Trainer]
    sessions: Mapping[PolicyName, TrainingSession]
    pool: InferencePool
    publisher: Publisher
    updates: Updates
    versions: Versions
    evaluator: Evaluator
    checkpoints: Checkpoints
    events: Events
    monitor: Monitor
    warn: Callable[[str], None] = _ignore
    """Prints a warning on the screen; the journal has the facts already."""
    prune: Prune | None = None
    """Removes old rows; None if the size of the store is not bounded."""
    balancer: Balances | None = None
    """None if no instances are moved."""
    residency: Suspends | None = None
    """None if policies do not share training devices."""
