"""The rules of a run that may be exchanged: what `wire` makes of each kind, and of which class.

Parts of one run: what the orchestrator joins and `assemble` makes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flexmarl.events.hub import Events
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
    """Classes from which a run is wired. The defaults are those of production; a test of the laws breaks one."""

    admission: type[Admission] = Admission
    window: type[Window] = Window
    gate: type[Gate] = Gate
    rollout: type[Rollout] = Rollout


PRODUCTION = Rules()
"""None is broken."""


def _ignore(warning: str) -> None:
    pass


class Balances(Protocol):
    """What moves instances between policies while a run goes on."""

    async def watch(self) -> None:
        """Looks and moves until it is cancelled; its failure ends the run."""
        ...

    def rollout_ended(self, *, pauses: bool = True) -> None:
        """The step's rollout has ended; if it pauses then, what is done now is hidden behind the rest of training."""
        ...


class Suspends(Protocol):
    """What gives the training devices back."""

    async def suspend_all(self) -> None:
        """Returns when no policy holds a device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the orchestrator joins; `assemble` makes them."""

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
    """Puts a line on the screen; the journal has it already."""
    prune: Prune | None = None
    """For a store whose size is bounded."""
    balancer: Balances | None = None
    residency: Suspends | None = None
    """Where policies share training devices."""
