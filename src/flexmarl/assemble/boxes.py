"""Makes the sandbox of a run, if a tool or its workflow needs boxes, and checks it before anything runs."""

from typing import TYPE_CHECKING

from flexmarl.agents.settings import TeamSettings
from flexmarl.config import RunSettings
from flexmarl.imports import Lazy
from flexmarl.sandbox.interface import Sandbox
from flexmarl.sandbox.probe import Guarantee, check_guarantees, probe_now
from flexmarl.sandbox.settings import SandboxSettings
from flexmarl.tools.interface import needs_box

if TYPE_CHECKING:
    from flexmarl.sandbox.backends import bubblewrap
else:
    bubblewrap = Lazy("flexmarl.sandbox.backends.bubblewrap")  # Only runs with boxes load it.


def sandbox_of(settings: RunSettings) -> Sandbox | None:
    """The sandbox of a run; None if nothing needs one."""
    return bubblewrap.Bubblewrap(settings.sandbox) if boxed(settings.team) else None


def boxed(team: TeamSettings) -> list[str]:
    """The tools that need boxes, e.g. `solver's python`, and the workflow, if it does."""
    tools = [f"{name}'s {tool.name}" for name, agent in team.agents.items() for tool in agent.tools if needs_box(tool)]
    return [*tools, f"team.workflow of type {team.workflow.type}"] if team.workflow.boxed else tools


def check_sandbox_of(settings: RunSettings) -> list[Guarantee]:
    """Tries the guarantees that a run needs. Raises ConfigError if one is missing; [] if the run needs no box."""
    needs = boxed(settings.team)
    if not needs or settings.cluster.backend == "simulated":
        return []
    found = guarantees_of(settings.sandbox)
    check_guarantees(found, f"{', '.join(needs)} would run code of a model")
    return found


def guarantees_of(settings: SandboxSettings) -> list[Guarantee]:
    """Tries the guarantees of this machine."""
    return probe_now(bubblewrap.Bubblewrap(settings), settings.accept)


def sandbox_for(settings: SandboxSettings) -> Sandbox:
    """A sandbox by itself, for `flexmarl sandbox exec`."""
    return bubblewrap.Bubblewrap(settings)
