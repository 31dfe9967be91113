"""Programs that misbehave at the doors of a run: they edit, cut, leave, retry, ask twice, and speak three APIs.

consumes     an episode's door
waits for    the replies that it wants to read
produces     requests, most of which another part of the system must forgive
unblocked by the reply, or by nothing: some go away in the middle
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from flexmarl.agents import Team
from flexmarl.agents.doors import Door
from flexmarl.events.event import Events
from flexmarl.records import AgentName
from flexmarl.testing.gateway import AsgiClient, AsgiReply

URL = "http://127.0.0.1"
ENDPOINTS = ("chat/completions", "messages", "responses", "completions")
Message = Mapping[str, str]


def make_sessions(seed: int, events: Events, kind: Any = None) -> tuple[Any, Any]:
    """The doors of a run, and the ASGI application that serves them. `kind` replaces the class of a door.

    Needs the extra `gateway`.
    """
    from flexmarl.gateway.episode_door import EpisodeDoor
    from flexmarl.gateway.server import seats_alone
    from flexmarl.gateway.sessions import Sessions
    from flexmarl.gateway.settings import GatewaySettings

    random = Random(f"keys {seed}")
    settings = GatewaySettings(patience_s=random.choice([0.0, 0.0, 2.0]), heartbeat_s=random.choice([0.5, 10.0]))
    sessions = Sessions(
        settings,
        url=URL,
        limits={},
        events=events,
        new_key=lambda: f"{random.getrandbits(128):032x}",
        kind=kind or EpisodeDoor,
    )
    return sessions, seats_alone(sessions)


class OddProgram:
    """One program, at all seats of an episode."""

    def __init__(self, app: Any, door: Door, team: Team, random: Random, read: Callable[[int], None]) -> None:
        """`read` is called with the number of choices of each reply that was read to its end."""
        self._clients = {seat.name: AsgiClient(app, door.seats[seat.name]) for seat in team}
        self._random, self._read = random, read
        self._histories: list[tuple[str, list[Message]]] = []
        """Seat and history of each reply that was read."""
        self._numbers = 0

    async def play(self, words: str, *, acts: int) -> None:
        """Asks once as programs do, and then does so many odd things."""
        await self._ask(self._question(words))
        odd: Sequence[Callable[[str], Any]] = (
            self._ask_anew,
            self._follow,
            self._edit,
            self._cut,
            self._ask_twice,
            self._leave,
            self._retry,
            self._choose,
        )
        for _ in range(acts):
            await self._random.choice(odd)(words)

    def _question(self, words: str) -> list[Message]:
        self._numbers += 1
        return [{"role": "user", "content": f"{words} {self._numbers}"}]

    async def _ask(
        self, messages: list[Message], *, seat: str = "", leaves_after: int | None = None, retries: int = 0, **more: Any
    ) -> None:
        """Sends a history to a seat, in one of the APIs, and remembers what it reads."""
        name = seat or self._random.choice([*self._clients])
        endpoint = self._random.choice(ENDPOINTS) if not more else ENDPOINTS[0]
        body = _body(endpoint, messages) | more
        reply = await self._clients[AgentName(name)].post(
            endpoint, body, leaves_after=leaves_after, x_stainless_retry_count=str(retries or "")
        )
        if not reply.ended or reply.status != 200:
            return
        self._read(body.get("n", 1))
        if not body.get("stream"):
            said: Message = {"role": "assistant", "content": _text(endpoint, reply)}
            self._histories.append((name, [*messages, said]))

    async def _ask_anew(self, words: str) -> None:
        await self._ask(self._question(words))

    async def _follow(self, words: str) -> None:
        if self._histories:
            seat, history = self._random.choice(self._histories)
            await self._ask([*history, *self._question(words)], seat=seat)

    async def _edit(self, words: str) -> None:
        """Other words stand where a reply stood."""
        if self._histories:
            seat, history = self._random.choice(self._histories)
            await self._ask(
                [*history[:-1], {"role": "assistant", "content": "edited"}, *self._question(words)], seat=seat
            )

    async def _cut(self, words: str) -> None:
        """The first of the messages are gone, as after a compaction."""
        if self._histories:
            seat, history = self._random.choice(self._histories)
            await self._ask([*self._question("in short"), history[-1], *self._question(words)], seat=seat)

    async def _ask_twice(self, words: str) -> None:
        question, seat = self._question(words), self._random.choice([*self._clients])
        await asyncio.gather(*(self._ask(question, seat=seat, n=1) for _ in range(2)))

    async def _leave(self, words: str) -> None:
        """Goes away before the reply, or in the middle of its stream."""
        streams = self._random.random() < 0.5
        leaves_after = self._random.choice([0, 1, 2, 3]) if streams else 0
        await self._ask(self._question(words), stream=streams, leaves_after=leaves_after)

    async def _retry(self, words: str) -> None:
        """Loses a reply on the way, and asks for it again."""
        question, seat = self._question(words), self._random.choice([*self._clients])
        await self._ask(question, seat=seat, stream=True, leaves_after=self._random.choice([0, 2]))
        await self._ask(question, seat=seat, stream=True, retries=1)

    async def _choose(self, words: str) -> None:
        await self._ask(self._question(words), n=self._random.randint(2, 3))


def _body(endpoint: str, messages: Sequence[Message]) -> dict[str, Any]:
    if endpoint == "completions":
        return {"prompt": "\n".join(one["content"] for one in messages)}
    if endpoint == "responses":
        return {"input": [*messages]}
    return {"messages": [*messages], "max_tokens": 100}


def _text(endpoint: str, reply: AsgiReply) -> str:
    said = reply.json
    if endpoint == "completions":
        return said["choices"][0]["text"]
    if endpoint == "messages":
        return "".join(block.get("text", "") for block in said["content"])
    if endpoint == "responses":
        parts = [part for item in said["output"] for part in item.get("content", ())]
        return "".join(part.get("text", "") for part in parts)
    return said["choices"][0]["message"]["content"] or ""
