"""The rules of a run that may be exchanged: what `wire` makes of each kind, and of which class."""

from dataclasses import dataclass

from flexmarl.experience.window import Window
from flexmarl.orchestrator.gate import Gate
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Classes from which a run is wired. The defaults are those of production; a test of the laws breaks one."""

    admission: type[Admission] = Admission
    window: type[Window] = Window
    gate: type[Gate] = Gate
    rollout: type[Rollout] = Rollout


PRODUCTION = Rules()
"""None is broken."""
