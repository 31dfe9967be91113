"""Server-sent events on ASGI: a response that is sent frame by frame, and the client's side of the connection.

Client    says whether the client is still there
EventResponse    a response of events, from its start to the last frame
Sending    decides which frames of a reply may be sent while it is sampled
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from flexmarl.cluster.concurrency import task_block
from flexmarl.gateway.dialects.base import Answer, Ask, Cut, Dialect, Frame, Refused, ReplyChoice, by_words

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

    async def waits_for(
        self, answer: "asyncio.Future[T]", seconds: float | None = None, *others: "asyncio.Future[None]"
    ) -> bool:
        """Waits until the answer is there, the client is gone, the time is over, or one of the others is done.

        True if the answer is there.
        """
        await asyncio.wait([answer, self.gone, *others], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
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


class Sending:
    """Decides which frames of an answer may be sent while its only reply is sampled.

    A dialect makes all frames of what is certain; sent are those up to the last one that holds a part of the reply. At
    the end it makes those of the whole: the first ones are those that were sent, cut where they were.
    """

    def __init__(self, dialect: Dialect, ask: Ask) -> None:
        self._dialect, self._ask = dialect, ask
        self._pieces: dict[str, list[str]] = {"thought": [], "text": []}
        self._sent = 0

    def more(self, so_far: Answer) -> list[Frame]:
        """The frames that may follow those that were sent. Parts of later answers begin with those of earlier ones."""
        (choice,) = so_far.choices
        new = False
        for name, pieces in self._pieces.items():
            whole, before = getattr(choice, name), sum(map(len, pieces))
            if len(whole) > before:
                pieces.append(whole[before:])
                new = True
        if not new:
            return []
        frames = [*self._dialect.frames(self._ask, so_far, self._cut(choice))]
        end = max((place for place, frame in enumerate(frames) if frame.characters), default=-1) + 1
        self._sent, begin = max(end, self._sent), self._sent
        return frames[begin:end]

    def rest(self, answer: Answer) -> list[Frame]:
        """The frames that are left. Raises Refused if the answer does not begin with what was sent."""
        if not self._sent:
            return [*self._dialect.frames(self._ask, answer, by_words)]
        (choice,) = answer.choices
        if not all(getattr(choice, name).startswith("".join(pieces)) for name, pieces in self._pieces.items()):
            raise Refused("the tokenizer spells the beginning of the reply otherwise now", status=500, code="torn")
        return [*self._dialect.frames(self._ask, answer, self._cut(choice))][self._sent :]

    def _cut(self, choice: ReplyChoice) -> Cut:
        """Cuts thought and text where they were cut before. A dialect gives them as they are in the choice."""

        def cut(text: str) -> list[str]:
            before = next((pieces for name, pieces in self._pieces.items() if getattr(choice, name) is text), [])
            return [*before, *by_words(text[sum(map(len, before)) :])]

        return cut
