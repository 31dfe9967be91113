"""Runs the calls of a door's requests, and counts what engines sample for them.

consumes     calls of the seats at a door
waits for    what the episode's own calls wait for
produces     answers; the number of tokens of each, also of those that were given up
unblocked by the answer, or the end of the request
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field

from flexmarl.agents.caller import AgentSpec, Caller
from flexmarl.agents.context import Generate, Interrupted, OnTokens, forget
from flexmarl.errors import EngineError
from flexmarl.gateway.account import Account
from flexmarl.gateway.delivery import Exchange
from flexmarl.gateway.dialects.base import Answer, Ask, Refused, ReplyChoice
from flexmarl.gateway.history import PromptPlan
from flexmarl.gateway.reply_parts import ReplyParts
from flexmarl.records import AgentName, Generation, GenerationRequest, IntArray, SampleId, Turn
from flexmarl.records.ids import split_sample_id


@dataclass(frozen=True, slots=True)
class Voice:
    """A seat with one set of tools."""

    spec: AgentSpec
    caller: Caller
    system: str


@dataclass(slots=True, eq=False)
class Replies:
    """The replies to one request, from its first call to their delivery."""

    exchange: Exchange
    ask: Ask
    seat: AgentName
    voice: Voice
    plan: PromptPlan
    begun: str
    """Words that the prompt ends with and the reply begins with."""
    hidden: int
    """The first characters of `begun`, which the client has written itself."""
    name: str
    answer: "asyncio.Future[Answer]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    task: "asyncio.Task[None] | None" = None
    turns: dict[int, Turn] = field(default_factory=dict)
    """The turn of each choice, once its row is stored."""
    parts: dict[int, tuple[ReplyParts, ReplyChoice]] = field(default_factory=dict)
    error: str = ""
    opened: bool = False
    """True if the prompt has begun a thought."""
    created: int = 0
    """The event loop's time at which it was asked for, in seconds."""
    hop: int = 0
    """Number of its call in the episode, if somebody reads along."""
    streamed: list[int] = field(default_factory=list)
    """Ids that were sampled so far, if somebody reads along."""
    _news: "asyncio.Future[None] | None" = None

    def add_tokens(self, ids: IntArray) -> None:
        """Adds ids that were sampled, and wakes those who read along."""
        self.streamed.extend(ids.tolist())
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    def news(self, read: int) -> "asyncio.Future[None]":
        """Done if there are more ids than `read`, else at the next `add_tokens`."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        found = self._news
        if len(self.streamed) > read:
            self._news.set_result(None)
            self._news = None
        return found

    def refuse(self, refused: Refused) -> None:
        """Ends the wait of its clients with an error."""
        if not self.answer.done():
            self.answer.set_exception(refused)
            self.answer.exception()  # Perhaps nobody waits any more.


SAMPLED: ContextVar[tuple[Replies, int] | None] = ContextVar("sampled", default=None)
"""The choice that the running task samples."""


class HeardGenerate:
    """The function that serves an episode's calls, with a count of what it samples."""

    def __init__(self, generate: Generate, account: Account) -> None:
        self._generate, self._account = generate, account
        self.sent: dict[SampleId, tuple[Replies, int]] = {}
        self.left: dict[SampleId, asyncio.Future[Generation]] = {}
        """Calls that were given up; each future will soon hold the sampled tokens."""

    async def __call__(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Serves one call. A client that wants a stream of one reply reads along."""
        sample_id, choice = SampleId(request.request_id), SAMPLED.get()
        assert choice is not None, "only the replies of a door call through it"
        self.sent[sample_id] = choice

        def left(answer: "asyncio.Future[Generation]") -> None:
            self.left[sample_id] = answer
            interrupted(answer)

        replies, _ = choice
        if replies.ask.stream and replies.ask.n == 1:
            replies.hop, on_tokens = split_sample_id(sample_id)[1], replies.add_tokens
        generation = await self._generate(request, interrupted=left, on_tokens=on_tokens)
        self._account.sampled[sample_id] = len(generation.response_ids)
        return generation

    async def settle(self) -> None:
        """Waits for the answers of the calls that were given up."""
        if self.left:
            await asyncio.wait(self.left.values())

    def when_settled(self, then: Callable[[], None]) -> None:
        """Calls `then` when the tokens of all calls are known: at once, or when the last call has ended."""

        def count(_: object = None) -> None:
            if not all(answer.done() for answer in self.left.values()):
                return
            for sample_id, answer in self.left.items():
                with suppress(EngineError, asyncio.CancelledError):
                    self._account.sampled[sample_id] = len(answer.result().response_ids)
            then()

        under_way = [answer for answer in self.left.values() if not answer.done()]
        for answer in under_way:
            answer.add_done_callback(count)
        if not under_way:
            count()
