"""Runs episodes at agents that are running already: each gets an HTTP request, and its answer ends the episode.

    POST URL  {"task": {...}, "seats": {"solver": {openai_url, anthropic_url, key, model}}, "deadline_s": 300}
         ──►  {"answer": ..., "metrics": {"searches": 3}}          both may be left out

consumes     plays: the settings of a service, a task and the addresses of seats
waits for    the service's answer
produces     the answer and the metrics, or an EpisodeError that says what the service did
unblocked by the answer, the service that hangs up, `deadline_s`; a play that is cancelled hangs up itself
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx2
from pydantic import BaseModel, Field, ValidationError

from flexmarl.agents.black_box import Service
from flexmarl.errors import EpisodeError, described
from flexmarl.events.safe_json import parse_json

MOST_BYTES = 16 * 2**20
"""Longest answer of a service."""
CONNECTS_S = 10.0
"""Seconds in which a service must take a connection."""
SHOWN = 200
"""Characters of a wrong answer that its error shows."""


class ServiceAnswer(BaseModel):
    """The answer of a service; other fields are ignored."""

    answer: Any = None
    metrics: dict[str, float] = Field(default_factory=dict)


class ServiceHost:
    """The connections to services."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Plays for the length of a block."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx2.Timeout(None, connect=CONNECTS_S)
        # Proxies of the environment are for the world outside: a service gets keys of the gateway.
        async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as self._client:
            yield self

    async def play(self, service: Service, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Plays one episode; returns `answer` and `metrics`. Raises EpisodeError."""
        assert self._client is not None, "services are asked while the host is open"
        at = f"service {service.url}"
        body = {"task": payload["task"], "seats": payload["seats"], "deadline_s": service.deadline_s}
        try:
            async with (
                asyncio.timeout(service.deadline_s),
                self._client.stream("POST", service.url, json=body) as response,
            ):
                data = await _whole(response, at)
        except TimeoutError:
            raise EpisodeError(f"{at} did not answer within team.workflow.deadline_s={service.deadline_s:g}") from None
        except httpx2.ConnectError as error:
            raise EpisodeError(f"{at} cannot be reached ({described(error)}); is it running?") from None
        except httpx2.HTTPError as error:
            raise EpisodeError(f"{at} hung up ({described(error)})") from None
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"Task.data cannot be sent to a service, which gets JSON: {error}") from None
        if response.status_code != httpx2.codes.OK:
            text = data[:SHOWN].decode(errors="replace")
            raise EpisodeError(f"{at} answered status {response.status_code}: {text}")
        return _read(data, at)


async def _whole(response: httpx2.Response, at: str) -> bytes:
    """The body. Raises EpisodeError if it is too long."""
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) > MOST_BYTES:
            raise EpisodeError(f"{at} answered more than {MOST_BYTES} bytes")
    return bytes(data)


def _read(data: bytes, at: str) -> dict[str, Any]:
    """The answer. Raises EpisodeError if it is none."""
    try:
        return ServiceAnswer.model_validate(parse_json(data.decode())).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise EpisodeError(f"{at} answered {place}: {first['msg']}; it must be {{answer?, metrics?}}") from None
    except ValueError:
        text = data[:SHOWN].decode(errors="replace")
        raise EpisodeError(f"{at} answered no JSON: {text!r}; it must be {{answer?, metrics?}}") from None
