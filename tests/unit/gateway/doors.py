"""Episodes whose seats are played through a door, on a scripted model, in virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from flexmarl.agents import ChatRenderer, Team, TeamSpec
from flexmarl.agents.context import Interrupted, OnTokens, forget
from flexmarl.agents.doors import Door
from flexmarl.agents.settings import TeamSettings
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeAccount
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import PartialRow, Row
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.gateway.episode_door import EpisodeDoor
from flexmarl.gateway.server import application, listening_socket, serving
from flexmarl.gateway.sessions import Sessions
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.records import (
    AgentName,
    Episode,
    FinishReason,
    Generation,
    GenerationRequest,
    GroupId,
    GroupRecord,
    PolicyName,
    RowState,
    SampleId,
    Task,
    Version,
    VersionRun,
)
from flexmarl.rollout.player import Player
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.gateway import AsgiClient

TASK = Task(input_id="sum-1", prompt="3+4", reference="7")
GROUP = GroupRecord(group=GroupId(0), task=TASK, step=0)
POLICY = PolicyName("p")
SEATS = ("solver", "verifier")


@dataclass
class StoredTurn:
    """A row of the store."""

    sample_id: SampleId
    state: RowState
    reason: str
    parent: str
    prompt_ids: list[int]
    response_ids: list[int]

    @classmethod
    def of(cls, row: Row) -> "StoredTurn":
        ids = {name: np.asarray(row.values.get(name, ())).tolist() for name in ("prompt_ids", "response_ids")}
        return cls(row.sample_id, row.state, row.reason, row.values.get("parent", ""), **ids)


@dataclass
class Played:
    """An episode that was played through a door."""

    episode: Episode
    account: EpisodeAccount
    rows: list[StoredTurn]
    engine_tokens: int
    notes: dict[str, Any] = field(default_factory=dict)


class TokenModel:
    """Generate function that samples a scripted reply token by token, `token_s` each, and counts what it sampled.

    A call that is cancelled keeps its tokens. With `scramble`, words come in random tokenisations of their own. A reply
    that begins with `!` fails after the rest is sampled.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: Callable[[str, GenerationRequest], str],
        *,
        token_s: float = 0.1,
        scramble: bool = False,
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.tokens = 0
        self._tokenizer, self._script, self._token_s, self._scramble = tokenizer, script, token_s, scramble

    async def __call__(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        self.requests.append(request)
        prompt = self._tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False)
        reply = self._script(prompt, request)
        ids, finish = self._ids(reply.removeprefix("!"), request)
        sampled: list[int] = []
        try:
            for one in ids:
                await asyncio.sleep(self._token_s)
                sampled.append(one)
                self.tokens += 1
                if on_tokens is not None and len(sampled) < len(ids):
                    on_tokens(np.asarray([one], np.int32))
        except asyncio.CancelledError:
            answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            answer.set_result(self._generation(request, sampled, FinishReason.ABORT))
            interrupted(answer)
            raise
        if reply.startswith("!"):
            return self._generation(request, sampled, FinishReason.ERROR)
        return self._generation(request, sampled, finish)

    def _ids(self, reply: str, request: GenerationRequest) -> tuple[list[int], FinishReason]:
        pieces, rng = [reply], random.Random(request.seed)
        if self._scramble:
            cuts = sorted(rng.sample(range(len(reply) + 1), min(len(reply), 3)))
            pieces = [reply[a:b] for a, b in pairwise([0, *cuts, len(reply)])]
        wanted = [one for piece in pieces for one in self._tokenizer(piece, add_special_tokens=False).input_ids]
        ids: list[int] = []
        for one in [*wanted, self._tokenizer.eos_token_id][: request.sampling.max_tokens]:
            ids.append(one)
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if one in request.sampling.stop_ids or any(stop in text for stop in request.sampling.stop):
                return ids, FinishReason.STOP
        return ids, FinishReason.LENGTH

    def _generation(self, request: GenerationRequest, ids: list[int], finish: FinishReason) -> Generation:
        logprobs = -np.random.default_rng(request.seed).random(len(ids)).astype(np.float32)
        return Generation(
            request_id=request.request_id,
            response_ids=np.asarray(ids, dtype=np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=finish,
            error="broken" if finish is FinishReason.ERROR else "",
        )


class CountingStore(SqliteStore):
    """A store that counts the responses it has."""

    responses = 0

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        await super().put(agent, rows)
        self.responses += sum("response_ids" in row.values for row in rows)


class At:
    """A door, the clients at its seats, and room for what a test wants to remember."""

    def __init__(self, door: Door, sessions: Sessions, app: Any, team: Team, store: "CountingStore") -> None:
        self.door, self.sessions, self.app, self.team, self.store = door, sessions, app, team, store
        self.notes: dict[str, Any] = {}

    def client(self, seat: str = "solver") -> AsgiClient:
        return AsgiClient(self.app, self.door.seats[seat])

    async def chat(self, *messages: tuple[str, str], **body: Any) -> dict[str, Any]:
        said = [{"role": role, "content": content} for role, content in messages]
        reply = await self.client().post("chat/completions", {"messages": said, **body})
        return reply.json


@cache
def renderer_of(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)


def play(
    program: Callable[[At], Awaitable[None]],
    model: "TokenModel",
    tokenizer: PreTrainedTokenizerFast,
    *,
    agent: dict[str, Any] | None = None,
    limits: dict[PolicyName, int] | None = None,
    kind: type[EpisodeDoor] = EpisodeDoor,
    sockets: bool = False,
    **settings: Any,
) -> Played:
    """Plays one episode; `program` speaks through the door, with `sockets` in real time and over HTTP."""
    agents = {name: {"policy": POLICY, **(agent or {})} for name in SEATS}
    given = TeamSettings.model_validate({"agents": agents, "workflow": {"type": "sequential", "agents": SEATS}})
    notes: dict[str, Any] = {}

    async def run() -> Played:
        events, accounts = Events(), list[EpisodeAccount]()
        events.listen(EpisodeAccount, accounts.append)
        listening = listening_socket("127.0.0.1", 0) if sockets else None
        port = listening.getsockname()[1] if listening else 1
        sessions = Sessions(
            GatewaySettings(**settings), url=f"http://127.0.0.1:{port}", limits=limits or {}, events=events, kind=kind
        )
        app = application(sessions)

        async def workflow(task: Task, seats: Team) -> None:
            async with seats.door() as door:
                at = At(door, sessions, app, seats, store)
                try:
                    await program(at)
                finally:
                    notes.update(at.notes, key=door.seats["solver"].key, app=app, seat=door.seats["solver"])
            seats.reward(1.0)

        spec = TeamSpec.build(given, {POLICY: renderer_of(tokenizer)}, [POLICY])
        spec = type(spec)(agents=spec.agents, trained=spec.trained, run=workflow)
        store = CountingStore(agents=[AgentName(name) for name in SEATS], columns=TURN_COLUMNS)
        player = Player(
            team=spec, generate=model, run_seed=0, timeout_s=1000.0, store=store, events=events, doors=sessions
        )
        async with serving(app, listening) if listening else nullcontext():
            episode = await player.play(GROUP, 0)
        if episode.failure and episode.failure.kind != "EpisodeError":  # An assertion of the program's, mostly.
            raise AssertionError(episode.reason_and_place)
        ids = [SampleId(request.request_id) for request in model.requests]
        rows = [StoredTurn.of(row) for row in await store.get(ids)]
        await store.close()
        return Played(episode, accounts[-1], rows, model.tokens, notes)

    return asyncio.run(run()) if sockets else run_virtual(run())
