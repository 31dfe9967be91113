"""Opens the gateway of a run, where its settings ask for one: the HTTP server, the doors, the process for programs.

settings ──► socket ──► Sessions (doors of episodes) ──► uvicorn in the run's event loop
                             ├──► ProgramHost, whose process starts with the first program
             ├──► ServiceHost, the connections to running agents
             └──► CommandHost, if the workflow is a command: a Unix socket, and boxes that reach it alone
"""

import importlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from flexmarl.agents.black_box import Command
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.events.event import Events
from flexmarl.gateway.episode_door import Runner
from flexmarl.gateway.runners.boxed_commands import CommandHost
from flexmarl.gateway.runners.programs import ProgramHost
from flexmarl.gateway.sessions import Sessions
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.records import PolicyName


@asynccontextmanager
async def opened_gateway(
    blueprint: Blueprint, gateway: GatewaySettings, events: Events, folder: Path | None
) -> AsyncIterator[Sessions]:
    """Serves the seats of a run's team for the length of a block. `folder`: the run's, if it has one.

    Raises MissingExtra if the packages are not installed, ConfigError if it cannot listen.
    """
    server, services = server_or_refuse(), module_or_refuse("flexmarl.gateway.runners.services")
    try:
        listening = server.listening_socket(gateway.host, gateway.port)
    except OSError as error:
        raise ConfigError(
            f"gateway: cannot listen on {gateway.host}:{gateway.port}: {error}; use port 0 for a free one"
        ) from None
    host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    settings = blueprint.settings
    code = [settings.path(path) for path in settings.code]
    async with ProgramHost(code).open() as programs, services.ServiceHost().open() as running:
        runners: dict[str, Runner] = {"program": programs, "service": running}
        sessions = Sessions(gateway, url=url, limits=limits_of(settings), events=events, runners=runners)
        async with AsyncExitStack() as stack:
            if isinstance(settings.team.workflow, Command):
                runners["command"] = await stack.enter_async_context(_commands(blueprint, server, sessions, folder))
            await stack.enter_async_context(server.serving(server.application(sessions), listening))
            yield sessions


@asynccontextmanager
async def _commands(
    blueprint: Blueprint, server: ModuleType, sessions: Sessions, folder: Path | None
) -> AsyncIterator[CommandHost]:
    """Serves seats at a Unix socket for the length of a block. Raises ConfigError if boxes cannot reach it."""
    settings, sandbox = blueprint.settings, blueprint.team.sandbox
    command = settings.team.workflow
    assert isinstance(command, Command)
    assert sandbox is not None, "blueprints of boxed workflows have a sandbox"
    with TemporaryDirectory(prefix="flexmarl-") as place:
        os.chmod(place, 0o711)  # Boxes are nobody's, and must get through.
        path = Path(place) / "gateway.sock"
        outputs = folder / "commands" if folder else None
        host = CommandHost(sandbox, path, base=settings.base.absolute(), outputs=outputs)
        async with server.serving(server.seats_alone(sessions), server.unix_socket(path)):
            await host.check(command)
            yield host


def server_or_refuse() -> ModuleType:
    """The gateway's server. Raises MissingExtra if a package of it is not installed."""
    return module_or_refuse("flexmarl.gateway.server")


def module_or_refuse(name: str) -> ModuleType:
    """A module of the gateway. Raises MissingExtra if a package of the extra is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("starlette", "uvicorn", "httptools", "httpx2"):
            raise MissingExtra("gateway", "the gateway, at which programs play seats,") from None
        raise


def limits_of(settings: RunSettings) -> dict[PolicyName, int]:
    """Most tokens of prompt and reply together, by policy, as far as its engine's settings say."""
    limits = {name: getattr(policy.engine, "max_len", None) for name, policy in settings.policies.items()}
    return {PolicyName(name): limit for name, limit in limits.items() if limit is not None}
