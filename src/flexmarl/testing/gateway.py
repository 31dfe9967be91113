"""Clients of a gateway without sockets: an ASGI application is called as a server would, also by those that go away.

client = AsgiClient(app, door.seats["solver"])
reply = await client.post("chat/completions", {"messages": [{"role": "user", "content": "3+4"}]})
lost = await client.post("messages", body, leaves_after=2)      # goes when it has got two frames
"""

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from flexmarl.agents.doors import SeatAddress


@dataclass(slots=True)
class AsgiReply:
    """The response as far as a client has got it."""

    status: int = 0
    frames: list[bytes] = field(default_factory=list)
    """Bodies of the messages, in order."""
    ended: bool = False
    """True if the server has ended the response."""

    @property
    def text(self) -> str:
        """All of the body."""
        return b"".join(self.frames).decode()

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The data of a stream's events, without comments and without `[DONE]`."""
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class AsgiClient:
    """A program at one seat."""

    def __init__(self, app: Any, seat: SeatAddress) -> None:
        self._app, self._seat = app, seat

    async def post(self, endpoint: str, body: Any, *, leaves_after: int | None = None, **headers: str) -> AsgiReply:
        """Sends a request. `leaves_after`: it disconnects when it has got so many frames; 0: before the first one.

        `headers` have underscores for hyphens. A body of bytes is sent as it is.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", endpoint, data, leaves_after=leaves_after, **headers)

    async def get(self, endpoint: str, **headers: str) -> AsgiReply:
        """Gets something."""
        return await self.send("GET", endpoint, b"", leaves_after=None, **headers)

    async def send(
        self, method: str, endpoint: str, data: bytes, *, leaves_after: int | None = None, **headers: str
    ) -> AsgiReply:
        """Sends any request; returns when the application has ended."""
        reply, gone, asked = AsgiReply(), asyncio.Event(), False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": data, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if gone.is_set():
                return  # As uvicorn: what is sent to a client that has gone is dropped.
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                return
            reply.frames.append(message.get("body", b""))
            reply.ended = not message.get("more_body", False)
            if leaves_after is not None and len(reply.frames) >= leaves_after and not reply.ended:
                gone.set()

        if leaves_after == 0:
            asyncio.get_running_loop().call_soon(gone.set)
        await self._app(self._scope(method, endpoint, headers), receive, send)
        return reply

    def _scope(self, method: str, endpoint: str, headers: Mapping[str, str]) -> dict[str, Any]:
        path = "/" + self._seat.openai_url.split("://", 1)[1].partition("/")[2] + "/" + endpoint
        given = {"host": "127.0.0.1", "authorization": f"Bearer {self._seat.key}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
        }
