"""Runs the gateway's HTTP: an ASGI application on Starlette, and uvicorn around it.

    POST /e/KEY/SEAT/v1/chat/completions | completions | responses | messages | messages/count_tokens
    GET  /e/KEY/SEAT/v1/models, /v1/responses/ID;  DELETE /v1/responses/ID
    /episodes/...                                  for whoever drives episodes: driving.py
    GET  /openapi.json                             all of this, described for programs

consumes     requests of programs that play seats
waits for    the replies of the episode's door, and the client that reads them
produces     answers, whole or as streams with signs of life; errors in the dialect's form
unblocked by the reply, the client that goes, or the end of the episode
"""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import described
from flexmarl.events.safe_json import parse_json
from flexmarl.gateway.addresses import DoorAddress, address_of, check_caller, check_origin, seat_of
from flexmarl.gateway.dialects import DIALECTS, Dialect
from flexmarl.gateway.dialects.base import Ask, Frame, Refused
from flexmarl.gateway.driving import EpisodesApp
from flexmarl.gateway.episode_door import EpisodeDoor
from flexmarl.gateway.heard import Replies
from flexmarl.gateway.openapi import description
from flexmarl.gateway.sessions import Sessions
from flexmarl.gateway.sse import FIRST_BEAT_S, Client, EventResponse, Sending

COUNT = "messages/count_tokens"
READINGS = 64
"""A reply is read again when it has grown by more than such a part: each reading takes all of it, and a piece for each
token of a long reply would cost as much as the square of its length."""


def seats_alone(sessions: Sessions) -> Starlette:
    """The ASGI application of a gateway without what drives episodes, for agents in boxes."""
    return Starlette(routes=[Mount("/e", app=DoorApp(sessions))])


def application(sessions: Sessions) -> Starlette:
    """The ASGI application of a gateway."""
    episodes = EpisodesApp(sessions)
    described = JSONResponse(description())

    async def describe(request: Request) -> Response:
        try:
            check_origin(request.headers, hosts=sessions.settings.hosts)
        except Refused as refused:
            return JSONResponse(DIALECTS["chat/completions"].error(refused), refused.status)
        return described

    routes = [Route("/episodes", episodes), Mount("/episodes", app=episodes), Route("/openapi.json", describe)]
    return Starlette(routes=[Mount("/e", app=DoorApp(sessions)), *routes])


class DoorApp:
    """Serves the doors of the episodes that play."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions, self._settings = sessions, sessions.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request, client = Request(scope), Client(receive)
        address = address_of(scope["path"])
        dialect = _dialect_of(address, request.headers)
        try:
            if address is None:
                raise Refused(f"there is nothing at {scope['path'][:80]!r}", status=404, code="not_found")
            check_caller(address.key, request.headers, hosts=self._settings.hosts)
            door = self._sessions.door(address.key)
            if request.method == "POST":
                await self._post(address, dialect, door, request, client, send)
            else:
                await self._get(address, door, request)(scope, receive, send)
        except ConnectionError:
            return
        except Refused as refused:
            await asyncio.sleep(0)  # A program in this process that asks for ever must not stop the loop.
            await JSONResponse(dialect.error(refused), refused.status)(scope, receive, send)

    def _get(self, address: DoorAddress, door: EpisodeDoor, request: Request) -> Response:
        """Lists the models, or gives or forgets a stored response."""
        if address.endpoint == "models" and request.method == "GET":
            return JSONResponse(_models(door, anthropic="anthropic-version" in request.headers))
        kind, _, name = address.endpoint.partition("/")
        if kind == "responses" and name and request.method in ("GET", "DELETE"):
            kept = door.answer_named(name.removeprefix("resp_"))
            if kept is None:
                raise Refused(f"there is no response {name[:80]!r}", status=404, code="not_found")
            if request.method == "GET":
                return JSONResponse(DIALECTS["responses"].whole(kept.ask, kept.answer.result()))
            door.forget(name.removeprefix("resp_"))
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        raise Refused(f"{request.method} is not served at {address.endpoint!r}", status=405, code="method_not_allowed")

    async def _post(
        self, address: DoorAddress, dialect: Dialect, door: EpisodeDoor, request: Request, client: Client, send: Send
    ) -> None:
        """Reads a body, and serves what it asks for."""
        if address.endpoint not in (*DIALECTS, COUNT):
            served = ", ".join((*DIALECTS, COUNT))
            raise Refused(f"{address.endpoint[:80]!r} is not served; there are: {served}", status=404, code="not_found")
        data = await client.body(int(self._settings.max_body_mib * 2**20))
        try:
            body = parse_json(data.decode())
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {described(error)[:200]}", code="no_json") from None
        ask = dialect.ask(body)
        seat = seat_of(address, ask.model, list(door.seats), self._settings.models)
        if address.endpoint == COUNT:
            answer = JSONResponse({"input_tokens": door.count(seat, ask)})
            await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
            await send({"type": "http.response.body", "body": answer.body})
            return
        retries = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        replies = door.begin(
            seat,
            ask,
            dialect,
            body=hashlib.sha256(data).hexdigest(),
            retries=retries,
            session=request.headers.get("x-session-id", ""),
        )
        with _served(door, replies) as sent:
            async with client.watched():
                if ask.stream:
                    await self._stream(door, dialect, replies, client, send, sent)
                else:
                    await self._whole(dialect, ask, replies, client, send, sent)

    async def _whole(
        self, dialect: Dialect, ask: Ask, replies: Replies, client: Client, send: Send, sent: "HandedOver"
    ) -> None:
        if not await client.waits_for(replies.answer):
            return
        try:
            answer, status = dialect.whole(ask, replies.answer.result()), 200
        except Refused as refused:
            answer, status = dialect.error(refused), refused.status
        response = JSONResponse(answer, status)
        await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})
        sent.all = status == 200 and not client.is_gone

    async def _stream(
        self, door: EpisodeDoor, dialect: Dialect, replies: Replies, client: Client, send: Send, sent: "HandedOver"
    ) -> None:
        ask, stream = replies.ask, EventResponse(send)
        await stream.start()
        sending, clock = Sending(dialect, ask), asyncio.get_running_loop().time
        read = enough = 0
        beat_at = clock() + min(FIRST_BEAT_S, self._settings.heartbeat_s)
        while not await client.waits_for(replies.answer, max(0.0, beat_at - clock()), replies.news(enough)):
            if client.is_gone:
                return
            frames: list[Frame] = []
            if (number := len(replies.streamed)) > (read if clock() >= beat_at else enough):
                read, enough, frames = number, number + number // READINGS, sending.more(door.so_far(replies))
            if not await self._send(frames, client, stream, sent):
                return
            if not frames and clock() >= beat_at:
                await stream.write(dialect.heartbeat)
            if frames or clock() >= beat_at:
                beat_at = clock() + self._settings.heartbeat_s
        try:
            frames = sending.rest(replies.answer.result())
        except Refused as refused:
            await stream.write(dialect.error_frame(refused), last=True)
            return
        if await self._send(frames[:-1], client, stream, sent) and not client.is_gone:
            await stream.write(frames[-1].text, last=True)
            sent.all = not client.is_gone

    async def _send(self, frames: Sequence[Frame], client: Client, stream: EventResponse, sent: "HandedOver") -> bool:
        """Sends frames; returns False if the client has gone."""
        for frame in frames:
            if client.is_gone:
                return False
            await stream.write(frame.text)
            sent.characters += frame.characters
        return True


class HandedOver:
    """How much of a reply a client has got."""

    def __init__(self) -> None:
        self.all = False
        self.characters = 0


@contextmanager
def _served(door: EpisodeDoor, replies: Replies) -> Iterator[HandedOver]:
    """A block that serves replies to one client; the door is told what became of them, whatever happens."""
    sent = HandedOver()
    try:
        yield sent
    finally:
        if sent.all:
            door.delivered(replies)
        door.left(replies, sent.characters)


def _dialect_of(address: DoorAddress | None, headers: Mapping[str, str]) -> Dialect:
    endpoint = address.endpoint if address else ""
    named = next((name for name in DIALECTS if endpoint == name or endpoint.startswith(f"{name}/")), None)
    return DIALECTS[named or ("messages" if "anthropic-version" in headers else "chat/completions")]


def _models(door: EpisodeDoor, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in door.seats
        ]
        return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": "flexmarl"} for name in door.seats],
    }


class _Uvicorn(uvicorn.Server):
    """A server in the run's own event loop: signals are the run's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to serve."""
        await super().startup(sockets)
        self.ready.set()


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError if the port is taken."""
    # asyncio sends small parts at once on sockets that name TCP only; else an answer waits 40 ms for the client's ACK.
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(2048)
    listening.setblocking(False)
    return listening


def unix_socket(path: Path) -> socket.socket:
    """A Unix socket that listens, for every user: boxes are nobody's."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o666)
    listening.listen(2048)
    listening.setblocking(False)
    return listening


@asynccontextmanager
async def serving(app: Any, listening: socket.socket) -> AsyncIterator[None]:
    """Serves an application on a socket for the length of a block."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )
    server = _Uvicorn(config)
    async with task_block() as tasks:
        tasks.create_task(server.serve(sockets=[listening]), name="gateway/server")
        try:
            await server.ready.wait()
            yield
        finally:
            server.should_exit = True
