"""Makes the sandbox of a run, if a tool, its workflow or the scorer needs boxes, and checks it before it runs."""

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flexmarl.agents.settings import TeamSettings
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.imports import Lazy
from flexmarl.records.scorers import SCORERS
from flexmarl.sandbox.interface import Sandbox
from flexmarl.sandbox.probe import Guarantee, check_guarantees, probe_now
from flexmarl.sandbox.settings import SandboxSettings
from flexmarl.sandbox.spare_boxes import SparePool
from flexmarl.tasks import scorers
from flexmarl.tasks.table import TaskTable
from flexmarl.tools.interface import needs_box
from flexmarl.tools.mcp import McpServer, as_text

if TYPE_CHECKING:
    from flexmarl.sandbox.backends import bubblewrap
    from flexmarl.tools import mcp_session
else:
    bubblewrap = Lazy("flexmarl.sandbox.backends.bubblewrap")  # Only runs with boxes load it.
    mcp_session = Lazy("flexmarl.tools.mcp_session")

LOOKED_AT = 16
"""First tasks of a generator, of each split, whose scorers are looked at."""


def sandbox_of(settings: RunSettings) -> Sandbox | None:
    """The sandbox of a run; None if nothing needs one. Raises ConfigError for a simulation whose scorer needs one."""
    scorer = boxed_scorer(settings)
    if scorer and settings.cluster.backend == "simulated":
        raise ConfigError(
            f"tasks: {scorer} runs code in boxes, and virtual time cannot wait for them; simulate with tasks whose "
            f"scorer is a plain function, or use `flexmarl train`"
        )
    if not (scorer or boxed(settings.team)):
        return None
    made = bubblewrap.Bubblewrap(settings.sandbox)
    return SparePool(made, settings.sandbox.spare) if settings.sandbox.spare else made


def boxed(team: TeamSettings) -> list[str]:
    """The tools that need boxes, e.g. `solver's python`, and the workflow, if it does."""
    tools = [f"{name}'s {tool.name}" for name, agent in team.agents.items() for tool in agent.tools if needs_box(tool)]
    return [*tools, f"team.workflow of type {team.workflow.type}"] if team.workflow.boxed else tools


def boxed_scorer(settings: RunSettings) -> str:
    """The scorer that needs boxes, e.g. `the scorer of train-1-0`; empty if none of the first tasks has one."""
    if isinstance(settings.tasks, TaskTable):
        named = settings.tasks.scorer
        return f"the scorer {named}" if scorers.needs_box(SCORERS[named]) else ""
    source = settings.tasks.open(seed=settings.seed, base=settings.base)
    first = (*map(source.train, range(LOOKED_AT)), *source.held_out(LOOKED_AT))
    return next((f"the scorer of {task.input_id}" for task in first if scorers.needs_box(task.scorer)), "")


def check_sandbox_of(settings: RunSettings) -> list[Guarantee]:
    """Tries the guarantees that a run needs. Raises ConfigError if one is missing; [] if the run needs no box."""
    if settings.cluster.backend == "simulated":
        return []
    needs = [*boxed(settings.team), *filter(None, [boxed_scorer(settings)])]
    if not needs:
        return []
    found = guarantees_of(settings.sandbox)
    check_guarantees(found, f"{', '.join(needs)} would run code of a model")
    return found


def servers_of(settings: RunSettings) -> list[McpServer]:
    """The MCP servers of a config, each file of tools once."""
    entries = (tool for agent in settings.team.agents.values() for tool in agent.tools)
    return list({tool.tools_file: tool for tool in entries if isinstance(tool, McpServer)}.values())


def pin_tools(settings: RunSettings) -> Iterator[tuple[McpServer, Sequence[str]]]:
    """Asks each MCP server of a config for its tools, and writes its file. Raises ConfigError if a server fails.

    Yields each server with the names of its tools.
    """
    if any(server.needs_box for server in servers_of(settings)):
        check_guarantees(guarantees_of(settings.sandbox), "an MCP server would run in a box")
    for server in servers_of(settings):
        if find_spec("mcp") is None:
            raise MissingExtra("mcp", "tools of type mcp")
        listed = asyncio.run(mcp_session.listed_tools(server, bubblewrap.Bubblewrap(settings.sandbox)))
        try:
            server.tools_file.write_text(as_text(listed), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"tools: {server.tools_file} cannot be written: {error.strerror}") from error
        yield server, [one["name"] for one in listed]


def guarantees_of(settings: SandboxSettings) -> list[Guarantee]:
    """Tries the guarantees of this machine."""
    return probe_now(bubblewrap.Bubblewrap(settings), settings.accept)


def sandbox_for(settings: SandboxSettings) -> Sandbox:
    """A sandbox by itself, for `flexmarl sandbox exec`."""
    return bubblewrap.Bubblewrap(settings)
