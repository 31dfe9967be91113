"""Makes the sandbox of a run, if a tool, its workflow or the scorer needs boxes, and checks it before it runs."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flexmarl.agents.settings import TeamSettings
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, EpisodeError, MissingExtra
from flexmarl.imports import Lazy
from flexmarl.records.scorers import SCORERS
from flexmarl.sandbox.interface import Sandbox
from flexmarl.sandbox.leased_sandboxes import LeasedSandbox
from flexmarl.sandbox.probe import Guarantee, check_guarantees, probe_now
from flexmarl.sandbox.settings import AnySandbox, E2bSettings, SandboxFusionSettings, SandboxSettings
from flexmarl.sandbox.spare_boxes import SparePool
from flexmarl.tasks import scorers
from flexmarl.tasks.table import TaskTable
from flexmarl.tools.interface import each_tool, needs_box
from flexmarl.tools.mcp import McpServer, as_text

if TYPE_CHECKING:
    from flexmarl.sandbox.backends import bubblewrap, e2b_boxes, sandbox_fusion
    from flexmarl.tools import mcp_session
else:
    bubblewrap = Lazy("flexmarl.sandbox.backends.bubblewrap")  # Only runs with boxes load them.
    e2b_boxes = Lazy("flexmarl.sandbox.backends.e2b_boxes")
    sandbox_fusion = Lazy("flexmarl.sandbox.backends.sandbox_fusion")
    mcp_session = Lazy("flexmarl.tools.mcp_session")

LOOKED_AT = 16
"""First tasks of a generator, of each split, whose scorers are looked at."""


def sandbox_of(settings: RunSettings) -> Sandbox | None:
    """The sandbox of a run; None if nothing needs one. Raises ConfigError for a simulation whose scorer needs one."""
    scorer = boxed_scorer(settings)
    if scorer and settings.cluster.backend == "simulated" and settings.simulation.score_s is None:
        raise ConfigError(
            f"tasks: {scorer} runs code in boxes, and virtual time cannot wait for them; give the seconds of a score, "
            f"e.g. simulation.score_s=0.1, and scores are computed for real while virtual time stands still; or use "
            f"tasks whose scorer is a plain function"
        )
    if not (scorer or boxed(settings.team)):
        return None
    # A simulation that opens no box needs no package of a service either.
    made = sandbox_for(settings.sandbox if opening_boxes(settings) else SandboxSettings())
    spare = settings.sandbox.spare if isinstance(settings.sandbox, SandboxSettings) else 0
    return SparePool(made, spare) if spare else made


def boxed(team: TeamSettings, called: Collection[str] | None = None) -> list[str]:
    """The tools that need boxes, e.g. `solver's python`, and the workflow, if it does. `called`: only these tools."""
    entries = [(name, tool) for name, agent in team.agents.items() for tool in agent.tools if needs_box(tool)]
    if called is not None:
        entries = [entry for entry in entries if any(tool.name in called for tool in each_tool([entry[1]]))]
    tools = [f"{name}'s {tool.name}" for name, tool in entries]
    return [*tools, f"team.workflow of type {team.workflow.type}"] if team.workflow.boxed and called is None else tools


def opening_boxes(settings: RunSettings) -> list[str]:
    """All that opens boxes in the run; of a simulation, what it calls for real."""
    real = {name for name, twin in settings.simulation.tools.items() if twin.for_real}
    called = real if settings.cluster.backend == "simulated" else None
    return [*boxed(settings.team, called), *filter(None, [boxed_scorer(settings)])]


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
    if not (needs := opening_boxes(settings)):
        return []
    check_within_reach(settings)
    found = guarantees_of(settings.sandbox)
    check_guarantees(found, f"{', '.join(needs)} would run code of a model", where=place_of_boxes(settings.sandbox))
    return found


def check_within_reach(settings: RunSettings) -> None:
    """Raises ConfigError if boxes of a service would have to reach something of this machine."""
    if not settings.sandbox.remote:
        return
    servers = [f"the MCP server {server.name!r}" for server in servers_of(settings) if server.needs_box]
    command = [f"team.workflow of type {settings.team.workflow.type}"] if settings.team.workflow.boxed else []
    if named := [*command, *servers]:
        raise ConfigError(
            f"sandbox.type '{settings.sandbox.type}': its boxes reach nothing of this machine, and {', '.join(named)} "
            f"must; use sandbox.type=bubblewrap"
        )


def place_of_boxes(settings: AnySandbox) -> str:
    """The place of boxes, for errors."""
    return f"sandbox.type {settings.type}" if settings.remote else "this machine"


def servers_of(settings: RunSettings) -> list[McpServer]:
    """The MCP servers of a config, each once. Raises ConfigError if two have one file of tools."""
    entries = (tool for agent in settings.team.agents.values() for tool in agent.tools)
    found: dict[Path, McpServer] = {}
    for server in (tool for tool in entries if isinstance(tool, McpServer)):
        first = found.setdefault(server.tools_file, server)
        if first.model_copy(update={"only": ()}) != server.model_copy(update={"only": ()}):
            raise ConfigError(
                f"team.agents: two MCP servers, {first.name!r} and {server.name!r}, have the same "
                f"tools_file={server.tools_file}; give each a file of its own, or both the same settings but `only`"
            )
    return list(found.values())


def pin_tools(settings: RunSettings) -> Iterator[tuple[McpServer, Sequence[str]]]:
    """Asks each MCP server of a config for its tools, and writes its file. Raises ConfigError if a server fails.

    Yields each server with the names of its tools.
    """
    if any(server.needs_box for server in servers_of(settings)):
        check_within_reach(settings)
        check_guarantees(guarantees_of(settings.sandbox), "an MCP server would run in a box")
    for server in servers_of(settings):
        if find_spec("mcp") is None:
            raise MissingExtra("mcp", "tools of type mcp")
        listed = asyncio.run(mcp_session.listed_tools(server, sandbox_for(settings.sandbox)))
        try:
            server.tools_file.write_text(as_text(listed), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"tools: {server.tools_file} cannot be written: {error.strerror}") from error
        yield server, [one["name"] for one in listed]


def guarantees_of(settings: AnySandbox) -> list[Guarantee]:
    """Tries the guarantees of this machine, or of a service."""
    return probe_now(sandbox_for(settings), settings)


def sandbox_for(settings: AnySandbox) -> Sandbox:
    """A sandbox by itself, without spare boxes. Raises MissingExtra if a package for it is not installed."""
    if isinstance(settings, SandboxFusionSettings):
        return sandbox_fusion.SandboxFusion(settings)
    if isinstance(settings, E2bSettings):
        return e2b_boxes.E2bSandbox(settings)
    return bubblewrap.Bubblewrap(settings)


def end_sandbox(leased: LeasedSandbox) -> None:
    """Ends a sandbox that a dead process left. Raises ConfigError if that is impossible, MissingExtra without E2B."""
    settings = E2bSettings(key_env=leased.key_env, domain=leased.domain)
    try:
        asyncio.run(e2b_boxes.E2bAccount(settings).killed(leased))
    except EpisodeError as error:
        raise ConfigError(str(error)) from error
