"""Server-sent events on ASGI: a response that is sent frame by frame, and the client's side of the connection.

Client    says whether the client is still there
EventResponse    a response of events, from its start to the last frame
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from flexmarl.cluster.concurrency import task_block
from flexmarl.gateway.dialects.base import Refused

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")
FIRST_BEAT_S = 1.0
"""Seconds after which a stream that waits for its reply shows that it lives."""


class Client:
    """The other end of one request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = asyncio.get_running_loop().create_future()
        """Done when it has disconnected."""

    @property
    def is_gone(self) -> bool:
        """True if it has disconnected."""
        return self.gone.done()

    async def body(self, most_bytes: int) -> bytes:
        """Reads the whole body. Raises Refused with 413 for a longer one, ConnectionError if the client goes."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away before its body had come")
            part = message.get("body", b"")
            size += len(part)
            if size > most_bytes:
                raise Refused(f"the body is longer than {most_bytes} bytes", status=413, code="too_large")
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """A block in which `gone` is done as soon as the client goes."""
        async with task_block() as tasks:
            watch = tasks.create_task(self._watch(), name="gateway/watch")
            try:
                yield
            finally:
                watch.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.gone.done():
            self.gone.set_result(None)

    async def waits_for(self, answer: "asyncio.Future[T]", seconds: float | None = None) -> bool:
        """Waits until the answer is there, the client is gone, or the time is over. True if the answer is there."""
        await asyncio.wait([answer, self.gone], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return answer.done()


class EventResponse:
    """A response of events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self) -> None:
        """Sends status and headers."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, text: str, *, last: bool = False) -> None:
        """Sends one frame. The last one ends the response, so that it is handed over with it or not at all."""
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": not last})
        if not last:
            await asyncio.sleep(0)  # A disconnect that has come is seen before the next frame.
