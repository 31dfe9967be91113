"""The tools of a server that speaks the Model Context Protocol (MCP): `{type: mcp}` gives an agent all of them.

    {type: mcp, name: files, command: [node, server/index.js, /box], reads: [server], tools_file: files.json}
    {type: mcp, name: shop, url: "https://shop.example/mcp", tools_file: shop.json}

`flexmarl mcp CONFIG` asks each server once for its tools and writes them into `tools_file`. From then on, a server that
lists other tools fails the episode: a model never sees a tool that nobody looked at.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.events.safe_json import parse_json
from flexmarl.imports import Lazy
from flexmarl.sandbox.interface import MIB, Limits
from flexmarl.settings import Settings
from flexmarl.tools.interface import BoundTool, Observation, ToolContext

if TYPE_CHECKING:
    from flexmarl.tools import mcp_session
else:
    mcp_session = Lazy("flexmarl.tools.mcp_session")  # Only runs with servers load the client.

Listed = Mapping[str, Any]
"""One tool as a server lists it: name, description, parameters."""


class McpServer(Settings):
    """The tools of an MCP server: one that is started in a box (`command`), or one that runs elsewhere (`url`)."""

    type: Literal["mcp"] = "mcp"
    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Name of the server. Agents call its tools `NAME.TOOL`."""
    command: tuple[str, ...] = ()
    """Program of the server and its arguments. It is started in a box, speaks on its standard input and output, and
    reaches no network."""
    reads: tuple[Path, ...] = ()
    """Files and folders of this machine that the box may read, at their own absolute paths: the server's program. Every
    user must be able to read them. A relative path starts from the working directory."""
    environment: Mapping[str, str] = Field(default={})
    """Variables of the server's environment, besides those of every box."""
    url: str = Field(default="", pattern=r"^$|^https?://[^@\s]+$")
    """Address of a server that speaks streamable HTTP, e.g. http://localhost:8000/mcp."""
    headers_from: Mapping[str, str] = Field(default={})
    """Headers of requests to `url`, each with the variable of flexmarl's own environment that has its value, e.g.
    {Authorization: SHOP_TOKEN}."""
    tools_file: Path
    """File with the server's tools, which `flexmarl mcp CONFIG` writes. A relative path starts from the working
    directory."""
    only: tuple[str, ...] = ()
    """Tools that the agent gets; empty: all."""
    scope: Literal["episode", "run"] = "episode"
    """episode: the agents of an episode share a session, with the files of the task in its box. run: all episodes that
    play at one time share one, for servers that keep nothing from call to call."""
    start_s: float = Field(default=30.0, gt=0, le=600)
    """Longest time in which the server starts and lists its tools, in seconds."""
    timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest call in seconds. The server is told that it was given up, and its session goes on."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of each tool of the server that run at once in the run; others wait. null: no bound."""
    memory_mib: int = Field(default=512, ge=32)
    """Most memory of the server's box, its files included."""
    pids: int = Field(default=128, ge=8)
    """Most processes and threads of the server's box."""
    disk_mib: int = Field(default=64, ge=1)
    """Size of /box, of /tmp and of /dev/shm in the server's box."""
    cpu_s: int = Field(default=3600, ge=1)
    """Most processor seconds of one process of the server."""

    @model_validator(mode="after")
    def _is_in_one_place(self) -> "McpServer":
        if bool(self.command) == bool(self.url):
            found = "both" if self.url else "none"
            raise ValueError(f"the server {self.name!r} needs one of command and url, got {found}")
        needless = (
            {"reads": self.reads, "environment": self.environment} if self.url else {"headers_from": self.headers_from}
        )
        if useless := [key for key, value in needless.items() if value]:
            kind = "url" if self.url else "command"
            raise ValueError(f"the server {self.name!r} has a {kind}, with which {useless[0]} means nothing; remove it")
        return self

    @property
    def needs_box(self) -> bool:
        """True if the server is started here."""
        return bool(self.command)

    @property
    def keeps_state(self) -> bool:
        """True if an episode has a session of its own."""
        return self.scope == "episode"

    @property
    def limits(self) -> Limits:
        """Limits of its box."""
        return Limits(
            memory_bytes=self.memory_mib * MIB, pids=self.pids, disk_bytes=self.disk_mib * MIB, cpu_s=self.cpu_s
        )

    def tools(self) -> tuple["McpTool", ...]:
        """The tools in `tools_file` that the agent gets. Raises ConfigError, or MissingExtra without the client."""
        if find_spec("mcp") is None:
            raise MissingExtra("mcp", "tools of type mcp")
        listed = {str(one["name"]): one for one in pinned_tools(self)}
        if unknown := [name for name in self.only if name not in listed]:
            raise ConfigError(
                f"tools: the MCP server {self.name!r} has no tool {unknown[0]!r}, which `only` names; there are: "
                f"{', '.join(listed) or 'none'}"
            )
        return tuple(McpTool(self, listed[name]) for name in self.only or listed)


class McpTool(NamedTuple):
    """One tool of a server."""

    server: McpServer
    listed: Listed

    @property
    def name(self) -> str:
        """Name that agents call it by, e.g. `files.read_file`."""
        return f"{self.server.name}.{self.listed['name']}"

    @property
    def description(self) -> str:
        """The server's own description."""
        return self.listed["description"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The server's own schema."""
        return self.listed["parameters"]

    @property
    def max_parallel(self) -> int | None:
        """The same for each tool of the server."""
        return self.server.max_parallel

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator[BoundTool]:
        """Opens the tool; the server is started at the first call of any of its tools."""
        async with mcp_session.shared(self.server, context) as session:
            yield BoundMcp(session, str(self.listed["name"]))


class BoundMcp:
    """A tool of a server that was opened for an episode."""

    def __init__(self, session: "mcp_session.SharedSession", name: str) -> None:
        self._session, self._name = session, name

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs one call. Raises EpisodeError if the server has ended, cannot be started, or lists other tools."""
        return await self._session.call(self._name, arguments)


def as_text(listed: Sequence[Listed]) -> str:
    """Tools as a file has them, in the order of their names."""
    return json.dumps(sorted(listed, key=lambda one: one["name"]), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def pinned_tools(server: McpServer) -> Sequence[Listed]:
    """The tools in the file of a server. Raises ConfigError that says how the file is made."""
    made = "write it with `flexmarl mcp CONFIG`"
    try:
        changed = server.tools_file.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"tools: the tools of the MCP server {server.name!r} cannot be read: {server.tools_file}: "
            f"{error.strerror}; {made}"
        ) from None
    try:
        return _read(server.tools_file, changed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"tools: {server.tools_file} has no list of tools: {error}; {made}") from None


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> tuple[Listed, ...]:
    """The tools in a file, in the state that it had at a time."""
    listed = parse_json(path.read_text(encoding="utf-8"))
    return tuple({key: one[key] for key in ("name", "description", "parameters")} for one in listed)
