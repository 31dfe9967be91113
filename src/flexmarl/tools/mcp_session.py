"""Runs sessions with MCP servers: one for an episode, or for all that play at one time.

consumes     calls of the agents' tools
waits for    the server: to start, to list its tools, to answer
produces     observations; EpisodeError if the server cannot be used
unblocked by `start_s` and `timeout_s`, by the end of the server, by the end of the last episode that has it open

A server that ends is started anew once, and the calls under way are repeated, if nothing is lost by that: its session
has answered no call yet, or has the scope `run`. Otherwise the episode fails.
"""

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from flexmarl.errors import ConfigError, EpisodeError, boundary, cause_of, described
from flexmarl.sandbox.interface import NOBODY, BoxOutcome, Sandbox
from flexmarl.tools.interface import Observation, ToolContext, spelled_out
from flexmarl.tools.mcp import Listed, McpServer, as_text, pinned_tools

MOST_LINE = 16 * 2**20
"""Longest message of a server, in bytes. A longer one of a server in a box ends the session."""
MOST_PAGES = 100
"""Pages of a list of tools."""
UNREADABLE = "SSE stream failed"
"""How the client begins its text about an event that it cannot read. The session goes on."""
GRACE_S = 2.0
"""Time beyond `timeout_s` in which the client must have given a call up; after it, the session counts as ended."""
CLOSE_S = 5.0
"""Time in which a session ends by itself; then it is cancelled."""
LAST_WORDS_S = 1.0
"""Time in which the box of a server that has ended tells how."""
FOR_EVER_S = 1e6
SERVE = """
import os, socket, subprocess
channel = socket.socket(socket.AF_UNIX)
channel.connect("/run/relay.sock")
environment = {{**os.environ, **{environment!r}}}
try:
    status = subprocess.call({command!r}, stdin=channel, stdout=channel, env=environment)
finally:
    channel.close()
raise SystemExit(status)
"""
"""The program that starts a server in its box, with the relay as its standard input and output."""


class ServerEnded(Exception):
    """The connection to the server is lost."""


class SharedSession:
    """The session of those that have a server open at one time."""

    def __init__(self, server: McpServer, context: ToolContext) -> None:
        self._server, self._context = server, context
        self._turn = asyncio.Lock()
        self._live: LiveSession | None = None
        self._restarted = False
        self.users = 0
        self.lost = ""
        """The reason why it cannot be used any more."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Calls a tool. See `BoundTool`."""
        while True:
            live = await self._started()
            try:
                return await live.call(name, arguments)
            except ServerEnded as ended:
                await self._ended(live, ended)

    async def _started(self) -> "LiveSession":
        async with self._turn:
            if self.lost:
                raise EpisodeError(self.lost)
            if self._live is None:
                live = LiveSession(self._server, self._context)
                try:
                    await live.begin()
                except BaseException:
                    await asyncio.shield(live.end())
                    raise
                self._live = live
            return self._live

    async def _ended(self, live: "LiveSession", ended: ServerEnded) -> None:
        """Makes room for a new session. Raises EpisodeError if there may be none."""
        async with self._turn:
            if self.lost:
                raise EpisodeError(self.lost)
            if self._live is not live:
                return  # Another call has seen it first.
            self._live = None
            await asyncio.shield(live.end())
            if self._restarted or (self._server.scope == "episode" and live.answered):
                why = "for the second time" if self._restarted else f"after {live.answered} calls, with what it kept"
                self.lost = f"the MCP server {self._server.name!r} ended {why}: {'; '.join([str(ended), *live.said])}"
                raise EpisodeError(self.lost)
            self._restarted = True

    async def close(self) -> None:
        """Ends the session."""
        if self._live is not None:
            await self._live.end()


class LiveSession:
    """One connection to a server that was started, or is about to be."""

    def __init__(self, server: McpServer, context: ToolContext) -> None:
        self._server, self._context = server, context
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._relisted = asyncio.Lock()
        self._changed = False
        self.answered = 0
        """Calls that the server has answered."""
        self.said: list[str] = []
        """Last words of a server in a box that has ended by itself."""
        # A task of its own: several episodes share the session, and contexts must be left by the task that entered.
        self._holder = asyncio.create_task(self._hold(), name=f"tools/{server.name}")

    async def begin(self) -> None:
        """Waits until the server has started and has listed its tools. Raises EpisodeError if it does not."""
        await asyncio.shield(self._ready)

    async def _hold(self) -> None:
        server = self._server
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(server.start_s):
                    client = await stack.enter_async_context(
                        Client(_transport(server, self._context, self.said), cache=None, message_handler=self._hear)
                    )
                    await _check_tools(server, client)
                self._ready.set_result(client)
                await self._over.wait()
        except TimeoutError:
            late = f"the MCP server {server.name!r} did not start in start_s={server.start_s:g} seconds"
            self._fail(EpisodeError(late))
        except Exception as error:
            cause = cause_of(error)
            lost = f"the MCP server {server.name!r} cannot be used: {'; '.join([described(cause), *self.said])}"
            self._fail(cause if isinstance(cause, EpisodeError) else EpisodeError(lost))
        finally:
            self._ready.cancel()

    def _fail(self, error: EpisodeError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # Its caller may have been cancelled; then nobody else looks.

    async def _hear(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._changed = True

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Calls a tool. Raises ServerEnded, or EpisodeError if the server has changed its tools."""
        client, most = self._ready.result(), self._server.timeout_s
        try:
            async with asyncio.timeout(most + GRACE_S):
                if self._changed:
                    await self._relist(client)
                result = await client.call_tool(name, dict(arguments), read_timeout_seconds=most)
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED and not error.message.startswith(UNREADABLE):
                raise ServerEnded(error.message) from None
            self.answered += 1
            if error.code == types.REQUEST_TIMEOUT:
                return Observation(f"it took longer than {most:g} s", ok=False)
            return Observation(error.message, ok=False)
        except TimeoutError:
            raise ServerEnded(f"it takes no messages, and a call of {name!r} could not be given up") from None
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ServerEnded(described(error)) from None
        self.answered += 1
        return observed(result)

    async def _relist(self, client: Client) -> None:
        """Looks at the tools again after the server said that they changed."""
        async with self._relisted:
            if self._changed:
                await _check_tools(self._server, client)
                self._changed = False

    async def end(self) -> None:
        """Ends the session and its server."""
        self._over.set()
        await asyncio.wait([self._holder], timeout=CLOSE_S)
        self._holder.cancel()
        await asyncio.wait([self._holder])


_SESSIONS: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], SharedSession]]" = WeakKeyDictionary()
"""Sessions of each event loop, by the server's settings and the episode."""


@asynccontextmanager
async def shared(server: McpServer, context: ToolContext) -> AsyncIterator[SharedSession]:
    """The session of an episode, or of all episodes, which ends when nobody has it open."""
    sessions = _SESSIONS.setdefault(asyncio.get_running_loop(), {})
    key = (server.model_dump_json(), context.episode if server.scope == "episode" else "")
    session = sessions.get(key)
    if session is None or session.lost:
        session = sessions[key] = SharedSession(server, context)
    session.users += 1
    try:
        yield session
    finally:
        session.users -= 1
        if not session.users:
            if sessions.get(key) is session:
                del sessions[key]
            await asyncio.shield(session.close())


async def listed_tools(server: McpServer, sandbox: Sandbox | None) -> list[Listed]:
    """Starts a server and asks for its tools, to pin them. Raises ConfigError if that fails."""
    context, said = ToolContext(episode="", seed=0, sandbox=sandbox), list[str]()
    with boundary(ConfigError, f"tools: the MCP server {server.name!r}"):
        try:
            async with asyncio.timeout(server.start_s), Client(_transport(server, context, said), cache=None) as client:
                return await _listed(client)
        except MCPError as error:
            raise ConfigError(f"tools: the MCP server {server.name!r}: {'; '.join([str(error), *said])}") from error
        except TimeoutError:
            raise ConfigError(
                f"tools: the MCP server {server.name!r} did not list its tools in start_s={server.start_s:g} seconds"
            ) from None


async def _listed(client: Client) -> list[Listed]:
    found: list[Listed] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            parameters = {"type": "object", "properties": {}, **tool.input_schema}
            found.append({"name": tool.name, "description": tool.description or tool.name, "parameters": parameters})
        if (cursor := page.next_cursor) is None:
            return found
    raise EpisodeError(f"it lists its tools on more than {MOST_PAGES} pages")


async def _check_tools(server: McpServer, client: Client) -> None:
    """Raises EpisodeError if the server lists other tools than its file."""
    pinned, now = (
        {one["name"]: as_text([one]) for one in listed} for listed in (pinned_tools(server), await _listed(client))
    )
    if pinned != now:
        other = sorted(name for name in pinned.keys() | now.keys() if pinned.get(name) != now.get(name))
        raise EpisodeError(
            f"the MCP server {server.name!r} lists other tools than {server.tools_file}: {', '.join(other)}; look at "
            f"them, and write the file anew with `flexmarl mcp CONFIG`"
        )


def observed(result: types.CallToolResult) -> Observation:
    """A result as the agent reads it. Texts only: a result with an image or a sound is a mistake, which says so."""
    texts, refused = [], []
    for part in result.content:
        if isinstance(part, types.TextContent):
            texts.append(part.text)
        elif isinstance(part, types.EmbeddedResource) and isinstance(part.resource, types.TextResourceContents):
            texts.append(part.resource.text)
        elif isinstance(part, types.ResourceLink):
            texts.append(f"{part.name}: {part.uri}")
        else:
            refused.append(part.type)
    if refused:
        texts.append(f"the result holds content of type {', '.join(sorted(set(refused)))}, which cannot be shown")
    text = "\n".join(texts) or (json.dumps(result.structured_content) if result.structured_content else "")
    return Observation(text or "(no output)", ok=not (result.is_error or refused), data=result.structured_content)


def _transport(server: McpServer, context: ToolContext, said: list[str]) -> AbstractAsyncContextManager[Any]:
    if server.url:
        return _http(server)
    if context.sandbox is None:
        raise EpisodeError(f"the MCP server {server.name!r} runs in a box, and this run has no sandbox")
    return _boxed(server, context.sandbox, context.files if server.scope == "episode" else {}, said)


@asynccontextmanager
async def _http(server: McpServer) -> AsyncIterator[Any]:
    headers = {}
    for name, variable in server.headers_from.items():
        if variable not in os.environ:
            raise EpisodeError(
                f"the header {name} of the MCP server {server.name!r} comes from the environment variable {variable}, "
                f"which is not set"
            )
        headers[name] = os.environ[variable].strip()
        if not (headers[name].isascii() and headers[name].isprintable()):  # The client's own error would show it.
            raise EpisodeError(f"the environment variable {variable} holds characters that no header can have")
    async with create_mcp_http_client(headers=headers | {"Accept-Encoding": "identity"}) as http:
        http.event_hooks = {"response": [_bounded]}
        async with streamable_http_client(server.url, http_client=http, max_sse_event_size=MOST_LINE) as streams:
            yield streams


async def _bounded(response: httpx2.Response) -> None:
    """Bounds what the client would read whole; events are bounded by the client."""
    media, codings = (response.headers.get(f"content-{of}", "").lower() for of in ("type", "encoding"))
    is_read = response.is_success and response.request.method != "DELETE"
    events = is_read and media.startswith("text/event-stream")
    fault = httpx2.SSEError if events else httpx2.StreamError  # Each is that which the client turns into an answer.
    if {coding.strip() for coding in codings.split(",")} - {"", "identity"}:
        response.stream = _AtMost(response.stream, 0, fault("it is compressed, and may unpack to gigabytes"))
    elif not events:
        response.stream = _AtMost(response.stream, MOST_LINE, fault(f"it has more than {MOST_LINE} bytes"))


class _AtMost(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, most: int, fault: Exception) -> None:
        self._stream, self._most, self._fault = stream, most, fault

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = 0
        async for piece in self._stream:
            length += len(piece)
            if length > self._most:
                raise self._fault
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def _boxed(
    server: McpServer, sandbox: Sandbox, files: Mapping[str, str | bytes], said: list[str]
) -> AsyncIterator[Any]:
    """The two streams of a server in a box, as the client takes them. `said` gets its last words if it ends."""
    program = SERVE.format(environment=dict(server.environment), command=list(server.command))
    reads = [path.absolute() for path in server.reads]
    with tempfile.TemporaryDirectory(prefix="flexmarl-") as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o711)
        path = Path(folder) / "server.sock"
        listener.bind(str(path))
        path.chmod(0o600)
        if os.geteuid() == 0:  # The box is nobody's then.
            os.chown(path, NOBODY, NOBODY)
        listener.listen(1)
        listener.setblocking(False)
        async with sandbox.open(files, server.limits, relay=path, reads=reads) as box, asyncio.TaskGroup() as group:
            running = group.create_task(box.run(program, timeout_s=FOR_EVER_S), name=f"tools/{server.name}/program")
            accepting = group.create_task(asyncio.get_running_loop().sock_accept(listener), name="tools/accept")
            await asyncio.wait([running, accepting], return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                raise EpisodeError(f"the MCP server {server.name!r} cannot be started: {_said(running.result())}")
            reader, writer = await asyncio.open_connection(sock=accepting.result()[0], limit=MOST_LINE)
            incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
            tasks = [
                group.create_task(_receive(reader, incoming, outgoing), name=f"tools/{server.name}/reader"),
                group.create_task(_send(writer, incoming, outgoing), name=f"tools/{server.name}/writer"),
                running,
            ]
            try:
                yield read, write
            finally:
                if tasks[0].done():  # The server has ended, and its last words are on their way.
                    await asyncio.wait([running], timeout=LAST_WORDS_S)
                if running.done():
                    said.append(_said(running.result()))
                for task in tasks:
                    task.cancel()
                writer.close()
                for stream in (incoming, read, write, outgoing):
                    stream.close()


def _said(outcome: BoxOutcome) -> str:
    return spelled_out(outcome.stderr.strip()[-500:]) or f"{outcome.ended}, exit status {outcome.exit}"


async def _receive(reader: asyncio.StreamReader, incoming: Any, outgoing: Any) -> None:
    """Messages of the server, a line each, until it ends or sends what is no message."""
    with incoming, outgoing, suppress(OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, ValueError):
        while line := await reader.readline():
            await incoming.send(SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False)))


async def _send(writer: asyncio.StreamWriter, incoming: Any, outgoing: Any) -> None:
    """Messages to the server, a line each, until it takes no more."""
    with incoming, suppress(OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for message in outgoing:
            writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await writer.drain()
