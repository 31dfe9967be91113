"""Runs the calls of a group's episodes: holds them back, cuts them at an episode's end, sends them in rounds.

TimeLimit: the clock of one episode, which pauses while a call of the episode is held back.

consumes     the seconds that the episode may take
waits for    nothing
produces     a TimeoutError in the block that it surrounds
unblocked by time, except the time in which a call is held back

EpisodeCalls: the calls of one episode. Each waits until it may be sent, and none outlives the episode.

consumes     calls of the episode's seats
waits for    the gate of the call's policy, if there is one; then the answer
produces     answers; an EpisodeError for a call that the episode's end cuts, or that comes after this end
unblocked by the answer, the caller's cancellation, or the end of the episode

Lockstep: the calls of one group in rounds. Its episodes take their turns together, one policy after another.

    episode 0   planner ┐            ┌ ─────────── ┐            ┌ writer ─┐
    episode 1   planner ┤ first the  ┤ ─────────── ┤ then the   ┤ writer  ┤ next round: when every
    episode 2   writer  ┘ planner's  └ planner ─── ┘ writer's   └ ─────── ┘ live episode calls again

A baseline (`rollout.order: lockstep`): frameworks without asynchronous rollout batch the calls of one agent, wait for
the longest of them, and then batch the calls of the next agent.

consumes       calls of the group's episodes
waits for      every live episode to call or to end; then, for one policy after another, the calls of that policy
produces       the same calls, sent when it is their policy's turn
unblocked by   a call, its end or cancellation, or the end of an episode
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from flexmarl.agents import Generate
from flexmarl.agents.context import Interrupted, OnTokens, forget
from flexmarl.errors import EpisodeError
from flexmarl.records import Generation, GenerationRequest, PolicyName


class TimeLimit:
    """The time limit of one episode: a block that ends with a TimeoutError after `seconds`, held calls not counted."""

    def __init__(self, seconds: float) -> None:
        self.timeout = asyncio.timeout(seconds)
        self._runs = False
        self._held = 0
        """Number of calls that are held now; several if the workflow calls in parallel."""
        self._left_s = 0.0
        """Seconds that were left when the first of them was held."""

    async def __aenter__(self) -> None:
        await self.timeout.__aenter__()
        self._runs = True

    async def __aexit__(self, *error: object) -> bool | None:
        self._runs = False
        return await self.timeout.__aexit__(*error)  # type: ignore[arg-type]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the clock for as long as the block lasts: in it, a call is held."""
        now = asyncio.get_running_loop().time
        due = self.timeout.when()
        if self._runs and due is not None and due > now():  # Else it is paused, or has expired.
            self._left_s = due - now()
            self.timeout.reschedule(None)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._runs and not self._held and self.timeout.when() is None:  # Else a stop has ended it.
                self.timeout.reschedule(now() + self._left_s)


Holds = Callable[[PolicyName], Awaitable[object] | None]
"""Gives the awaitable that a policy's call must wait for before it is sent; None: the call need not wait."""
LATE_S = 1.0
"""Delay before a late call is refused, so that a task that repeats it without end leaves room for others."""


async def refuse_late(call: str) -> None:
    """Raises EpisodeError, after `LATE_S`, for a call that a task sent after the end of its episode."""
    await asyncio.sleep(LATE_S)
    raise EpisodeError(f"call {call} came after the end of its episode; await every act in the workflow")


class EpisodeCalls:
    """The calls of one episode. The episode's time limit pauses while a call is held."""

    def __init__(self, generate: Generate, holds: Holds, limit: TimeLimit) -> None:
        self._generate, self._holds, self._limit = generate, holds, limit
        self._closed = False
        self._cuts: dict[asyncio.Timeout, None] = {}
        """One timeout for each call under way; it expires to cut the call."""
        self._call_ended = asyncio.Event()
        self._idle_since = asyncio.get_running_loop().time()
        """Time of the loop at which the last call ended."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended, or since the start; 0 while one is under way."""
        return 0.0 if self._cuts else asyncio.get_running_loop().time() - self._idle_since

    async def send(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sends one call, once it may be sent. Raises EpisodeError if the episode ends before the answer."""
        if self._closed:
            await refuse_late(request.request_id)
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._cuts[cut] = None
                try:
                    held = self._holds(request.policy)
                    if held is not None:
                        with self._limit.paused():
                            await held
                    return await self._generate(request, interrupted=interrupted, on_tokens=on_tokens)
                finally:
                    del self._cuts[cut]
                    self._idle_since = asyncio.get_running_loop().time()
                    self._call_ended.set()
        except TimeoutError:
            if not cut.expired():
                raise
        raise EpisodeError(f"call {request.request_id} was cut by the end of its episode; await every act")

    def close(self) -> None:
        """Refuses the calls that come from now on."""
        self._closed = True

    async def end(self) -> None:
        """Cuts the calls under way and returns when none is left."""
        self.close()
        for cut in self._cuts:
            cut.reschedule(asyncio.get_running_loop().time())
        while self._cuts:
            self._call_ended.clear()
            await self._call_ended.wait()


@dataclass(eq=False, slots=True)
class _Call:
    episode: object
    policy: PolicyName
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the call may be sent."""


class Lockstep:
    """Sends the calls of one group's episodes in rounds. A round has one or more calls of each live episode."""

    def __init__(self, policies: Sequence[PolicyName]) -> None:
        """`policies`: in the order of their turns; a repeated policy keeps its first place."""
        self._order = tuple(dict.fromkeys(policies))
        self._live: set[object] = set()
        self._waiting: list[_Call] = []
        """Calls for the next round."""
        self._round: deque[list[_Call]] = deque()
        """Calls of this round that are still to be sent, one list for each policy."""
        self._sent: set[_Call] = set()
        """Calls under way, of the policy whose turn it is; the next policy waits for them."""

    @contextmanager
    def episode(self, generate: Generate) -> Iterator[Generate]:
        """Adds an episode for as long as the block lasts; yields the function through which the episode calls."""
        episode = object()
        self._live.add(episode)
        try:
            yield partial(self._call, episode, generate)
        finally:
            self._live.remove(episode)
            self._advance()

    async def _call(
        self,
        episode: object,
        generate: Generate,
        request: GenerationRequest,
        /,
        *,
        interrupted: Interrupted = forget,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        call = _Call(episode, request.policy)
        self._waiting.append(call)
        self._advance()
        try:
            await call.turn
            return await generate(request, interrupted=interrupted, on_tokens=on_tokens)
        finally:
            self._end(call)

    def _end(self, call: _Call) -> None:
        """Removes a call that was answered, failed or was cancelled, and sends what may be sent now."""
        self._sent.discard(call)
        for calls in (self._waiting, *self._round):
            if call in calls:
                calls.remove(call)
        self._advance()

    def _advance(self) -> None:
        """When no call is under way, sends those of the round's next policy, or of the next round's first policy."""
        while not self._sent:
            if not self._round:
                if not self._waiting or not self._live <= {call.episode for call in self._waiting}:
                    return
                self._begin_round()
            calls = self._round.popleft()
            self._sent.update(calls)
            for call in calls:
                if not call.turn.done():  # A cancelled call: `_end` is about to remove it.
                    call.turn.set_result(None)

    def _begin_round(self) -> None:
        by_policy: dict[PolicyName, list[_Call]] = {policy: [] for policy in self._order}
        for call in self._waiting:
            by_policy[call.policy].append(call)
        self._round.extend(by_policy.values())
        self._waiting = []
