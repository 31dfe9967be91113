"""Runs the gateway's HTTP for whoever drives episodes: what they said is worth, their accounts, their begin and end.

    GET  /episodes/ID            the account                                    key: the reward key, or the admin key
    POST /episodes/ID/rewards    {reward, part?, seat?, call?} -> the account   key: the reward key
    POST /episodes               {task?} -> addresses and keys                  key: the admin key (`flexmarl serve`)
    POST /episodes/ID/end        -> the account, and how the episode ended      key: the reward key, or the admin key

A program at a seat knows neither key. Its own opens none of these paths.

consumes     requests with a key
waits for    the begin of an episode, or its end
produces     accounts as JSON; rewards of the episode's ledger; errors in OpenAI's form
unblocked by the driver, which bounds how many episodes are open
"""

import asyncio
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from flexmarl.errors import EpisodeError, described
from flexmarl.events.safe_json import parse_json
from flexmarl.gateway.addresses import check_origin, key_of, same_secret
from flexmarl.gateway.dialects import DIALECTS
from flexmarl.gateway.dialects.base import Body, Refused, checked
from flexmarl.gateway.sessions import Driver, Sessions
from flexmarl.gateway.sse import Client
from flexmarl.records import EpisodeId

MOST_BYTES = 2**20
"""Longest body."""


class RewardBody(Body):
    """A reward: of the whole team, of a seat, or of one reply."""

    reward: float
    part: str = "outcome"
    seat: str | None = None
    call: str | None = None
    """The id that the reply had on the wire."""


class OwnTask(Body):
    """A task that the driver brings."""

    prompt: str
    reference: str = ""
    input_id: str = "own"
    data: dict[str, Any] = Field(default_factory=dict)


class BeginBody(Body):
    """The begin of an episode."""

    task: OwnTask | int | None = None
    """A task of one's own, or the position of a training task; None: the next one."""


class EpisodesApp:
    """Serves those who drive episodes."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request, client = Request(scope), Client(receive)
        try:
            check_origin(request.headers, hosts=self._sessions.settings.hosts)
            response = await self._served(request, client)
        except ConnectionError:
            return
        except Refused as refused:
            await asyncio.sleep(0)
            response = JSONResponse(DIALECTS["chat/completions"].error(refused), refused.status)
        await response(scope, receive, send)

    async def _served(self, request: Request, client: Client) -> Response:
        parts = [part for part in request.scope["path"].split("/") if part][1:]
        key = key_of(request.headers)
        match request.method, parts:
            case "POST", []:
                driver = self._of_admin(key)
                task = checked(BeginBody, await _body(client)).task
                begun = await driver.begin(task.model_dump() if isinstance(task, OwnTask) else task)
                return JSONResponse(dict(begun), 201)
            case "GET", [name]:
                self._check(name, key, admin=True)
                return JSONResponse(self._shown(EpisodeId(name)))
            case "POST", [name, "rewards"]:
                self._check(name, key)
                return await self._reward(EpisodeId(name), client)
            case "POST", [name, "end"]:
                self._check(name, key, admin=True)
                if self._sessions.driver is None:
                    raise Refused("the run ends its episodes itself", status=405, code="no_driver")
                await self._sessions.driver.end(EpisodeId(name))
                return JSONResponse(self._shown(EpisodeId(name)))
        raise Refused("there is nothing here for that method", status=404, code="not_found")

    async def _reward(self, episode: EpisodeId, client: Client) -> Response:
        asked = checked(RewardBody, await _body(client))
        try:
            self._sessions.episode(episode).reward(asked.reward, asked.part, seat=asked.seat, call=asked.call)
        except EpisodeError as error:
            raise Refused(str(error)) from None
        return JSONResponse(self._shown(episode))

    def _shown(self, episode: EpisodeId) -> dict[str, Any]:
        driver = self._sessions.driver
        return {**self._sessions.shown(episode), **(driver.ending(episode) if driver else {})}

    def _of_admin(self, key: str) -> Driver:
        driver = self._sessions.driver
        if driver is None:
            raise Refused("the run begins its episodes itself; use `flexmarl serve`", status=405, code="no_driver")
        if not same_secret(key, driver.admin_key):
            raise Refused("the key is not the admin key", status=403, code="wrong_key")
        return driver

    def _check(self, name: str, key: str, *, admin: bool = False) -> None:
        """Raises Refused with 403, the same for a wrong key and for an episode that is not there."""
        opens = same_secret(key, self._sessions.reward_key(EpisodeId(name)))
        if admin and self._sessions.driver is not None:
            opens |= same_secret(key, self._sessions.driver.admin_key)
        if not opens:
            raise Refused("the key is not that of the episode's rewards", status=403, code="wrong_key")


async def _body(client: Client) -> Any:
    data = await client.body(MOST_BYTES)
    try:
        return parse_json(data.decode()) if data.strip() else {}
    except ValueError as error:
        raise Refused(f"the body is no JSON: {described(error)[:200]}", code="no_json") from None
