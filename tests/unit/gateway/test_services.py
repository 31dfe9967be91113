"""Agents that are running already, on real sockets: what they answer, and what they do instead."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flexmarl.agents.black_box import Service
from flexmarl.errors import EpisodeError
from flexmarl.gateway.runners.services import ServiceHost

SEATS = {"solver": {"openai_url": "http://127.0.0.1:1/e/k/solver/v1", "key": "k", "model": "solver"}}
PAYLOAD = {"task": {"prompt": "3+4"}, "seats": SEATS, "episode": "g0e0a0"}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> Any:
    """The body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    (length,) = [line.split(":")[1] for line in head.splitlines() if line.startswith("content-length:")]
    return json.loads(await reader.readexactly(int(length)))


def answering(body: bytes, status: str = "200 OK", heard: list[Any] | None = None) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await request_of(reader)
        if heard is not None:
            heard.append(asked)
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    return handle


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.close()


async def hangs_up_amid_its_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"answer":')
    await writer.drain()
    writer.close()


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await request_of(reader)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    try:
        while True:
            writer.write(b"x" * 2**20)
            await writer.drain()
    except ConnectionError:
        writer.close()


def played(handler: Handler, payload: Any = PAYLOAD, deadline_s: float = 60.0) -> Any:
    async def play() -> Any:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/play"
        async with server, ServiceHost().open() as host:
            return await host.play(Service(url=url, deadline_s=deadline_s), payload)

    return asyncio.run(play())


def test_a_service_gets_task_seats_and_deadline_and_no_reward_key() -> None:
    heard: list[Any] = []
    said = played(answering(b'{"answer": "7", "metrics": {"searches": 3}, "more": 1}', heard=heard))
    assert said == {"answer": "7", "metrics": {"searches": 3.0}}
    assert heard == [{"task": {"prompt": "3+4"}, "seats": SEATS, "deadline_s": 60.0}]


def test_answer_and_metrics_may_be_left_out() -> None:
    assert played(answering(b"{}")) == {"answer": None, "metrics": {}}


@pytest.mark.parametrize(
    ("handler", "named"),
    [
        (answering(b"overloaded", "503 Service Unavailable"), "answered status 503: overloaded"),
        (answering(b"", "204 No Content"), "answered status 204"),
        (answering(b"", "302 Found"), "answered status 302"),
        (answering(b"<html>"), "answered no JSON: '<html>'"),
        (answering(b"\xff\xfe"), "answered no JSON"),
        (answering(b"[" * 100_000), "answered no JSON"),
        (answering(b'["7"]'), "answered the body"),
        (answering(b'{"metrics": {"searches": "many"}}'), "answered metrics.searches"),
        (answering(b'{"metrics": {"searches": NaN}}'), "answered no JSON"),
        (hangs_up, "hung up"),
        (hangs_up_amid_its_answer, "hung up"),
        (floods, "more than 16777216 bytes"),
    ],
)
def test_what_a_service_does_instead_is_the_episodes_failure_by_name(handler: Handler, named: str) -> None:
    with pytest.raises(EpisodeError, match=r"^service http://127\.0\.0\.1:\d+/play ") as failed:
        played(handler)
    assert named in str(failed.value)


def test_a_service_that_is_too_slow_fails_the_episode() -> None:
    with pytest.raises(EpisodeError, match=r"did not answer within team\.workflow\.deadline_s=0\.05"):
        played(says_nothing, deadline_s=0.05)


def test_a_service_that_is_not_there_fails_the_episode() -> None:
    async def play() -> Any:
        server = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with ServiceHost().open() as host:
            return await host.play(Service(url=f"http://127.0.0.1:{port}/play"), PAYLOAD)

    with pytest.raises(EpisodeError, match=r"cannot be reached.*is it running"):
        asyncio.run(play())


def test_data_that_json_has_not_fails_the_episode() -> None:
    with pytest.raises(EpisodeError, match=r"Task\.data cannot be sent"):
        played(answering(b"{}"), {**PAYLOAD, "task": {"data": {1, 2}}})


def test_an_episode_that_ends_hangs_up_at_its_service() -> None:
    async def play() -> bool:
        began, gone = asyncio.Event(), asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            began.set()
            await reader.read()
            gone.set()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/play"
        async with server, ServiceHost().open() as host:
            playing = asyncio.create_task(host.play(Service(url=url), PAYLOAD))
            await began.wait()
            playing.cancel()
            await gone.wait()
        return playing.cancelled()

    assert asyncio.run(play())
