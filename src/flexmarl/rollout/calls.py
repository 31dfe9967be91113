"""Runs the clock of one episode's time limit, which stands still while something holds up its calls.

consumes     the seconds that the episode may take
waits for    nothing
produces     a TimeoutError in the block that it is around
unblocked by time, but for the time in which a call is held

Runs the calls of one episode: each waits until it may be sent, and none outlives the episode.

consumes     calls of the episode's seats
waits for    whatever holds a call up (a gate); then its answer
produces     answers; an EpisodeError for a call that the end of the episode cuts, or that comes after it
unblocked by the answer, the caller's cancellation, or the end of the episode

Runs the calls of one group in lockstep: its episodes take their turns together, one policy after another.

    episode 0   planner ┐            ┌ ─────────── ┐            ┌ writer ─┐
    episode 1   planner ┤ first the  ┤ ─────────── ┤ then the   ┤ writer  ┤ next round: when every
    episode 2   writer  ┘ planner's  └ planner ─── ┘ writer's   └ ─────── ┘ live episode calls again

A baseline (`rollout.order: lockstep`): frameworks without asynchronous rollout batch the calls of one agent, wait for
the longest of them, and go on with the next.

consumes       calls of the group's episodes
waits for      every live episode to call or to end; then, policy after policy, the calls of that policy
produces       the same calls, sent when it is their policy's turn
unblocked by   a call, its end or its cancellation, and the end of an episode, however it ends
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from flexmarl.agents import Generate
from flexmarl.agents.context import Interrupted, forget
from flexmarl.errors import EpisodeError
from flexmarl.records import Generation, GenerationRequest, PolicyName


class TimeLimit:
    """Of one episode: a block that ends with a TimeoutError when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.timeout = asyncio.timeout(seconds)
        self._runs = False
        self._held = 0
        """Calls that are held at this moment: of a workflow's parallel calls it may be several."""
        self._left_s = 0.0
        """What was left when the first of them was."""

    async def __aenter__(self) -> None:
        await self.timeout.__aenter__()
        self._runs = True

    async def __aexit__(self, *error: object) -> bool | None:
        self._runs = False
        return await self.timeout.__aexit__(*error)  # type: ignore[arg-type]

    @contextmanager
    def stands_still(self) -> Iterator[None]:
        """A call is held for as long as the block lasts."""
        now = asyncio.get_running_loop().time
        due = self.timeout.when()
        if self._runs and due is not None and due > now():  # Else it is over, or stopped, and about to be told so.
            self._left_s = due - now()
            self.timeout.reschedule(None)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._runs and not self._held and self.timeout.when() is None:  # Else it was stopped meanwhile.
                self.timeout.reschedule(now() + self._left_s)


Holds = Callable[[PolicyName], Awaitable[object] | None]
"""What a call of a policy has to wait for before it is sent; None: nothing."""
LATE_S = 1.0
"""Before a call is refused that came after the end of its episode: who repeats it for ever leaves room for others."""


async def refuse_late(call: str) -> None:
    """Raises EpisodeError for a call that a task sends which its workflow has left behind."""
    await asyncio.sleep(LATE_S)
    raise EpisodeError(f"call {call} came after the end of its episode; await every act in the workflow")


class EpisodeCalls:
    """Those of one episode. Its time limit stands still while a call is held up."""

    def __init__(self, generate: Generate, holds: Holds, limit: TimeLimit) -> None:
        self._generate, self._holds, self._limit = generate, holds, limit
        self._closed = False
        self._cuts: dict[asyncio.Timeout, None] = {}
        """One for each call that is under way."""
        self._left = asyncio.Event()

    async def send(self, request: GenerationRequest, /, *, interrupted: Interrupted = forget) -> Generation:
        """Answers one call."""
        if self._closed:
            await refuse_late(request.request_id)
        cut = asyncio.timeout(None)
        try:
            async with cut:
                self._cuts[cut] = None
                try:
                    held = self._holds(request.policy)
                    if held is not None:
                        with self._limit.stands_still():
                            await held
                    return await self._generate(request, interrupted=interrupted)
                finally:
                    del self._cuts[cut]
                    self._left.set()
        except TimeoutError:
            if not cut.expired():
                raise
        raise EpisodeError(f"call {request.request_id} was cut by the end of its episode; await every act")

    def close(self) -> None:
        """From now on no call is sent."""
        self._closed = True

    async def end(self) -> None:
        """Cuts the calls that are under way; returns when there are none."""
        self.close()
        for cut in self._cuts:
            cut.reschedule(asyncio.get_running_loop().time())
        while self._cuts:
            self._left.clear()
            await self._left.wait()


@dataclass(eq=False, slots=True)
class _Call:
    episode: object
    policy: PolicyName
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when it may be sent."""


class Lockstep:
    """The calls of one group's episodes, in rounds. A round has a call, or several, of each live episode."""

    def __init__(self, policies: Sequence[PolicyName]) -> None:
        """`policies` in the order of their turns; one that stands twice has the place where it stands first."""
        self._order = tuple(dict.fromkeys(policies))
        self._live: set[object] = set()
        self._waiting: list[_Call] = []
        """For the next round."""
        self._round: deque[list[_Call]] = deque()
        """What is left of this round: the calls of each policy that is still to come."""
        self._sent: set[_Call] = set()
        """Of the policy whose turn it is; the next one waits for them."""

    @contextmanager
    def episode(self, generate: Generate) -> Iterator[Generate]:
        """An episode of the group, for as long as the block lasts; its calls go through what this gives."""
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
    ) -> Generation:
        call = _Call(episode, request.policy)
        self._waiting.append(call)
        self._advance()
        try:
            await call.turn
            return await generate(request, interrupted=interrupted)
        finally:
            self._end(call)

    def _end(self, call: _Call) -> None:
        """The call was answered, failed or was cancelled: nobody waits for it any longer."""
        self._sent.discard(call)
        for calls in (self._waiting, *self._round):
            if call in calls:
                calls.remove(call)
        self._advance()

    def _advance(self) -> None:
        """Sends what may be sent now: the calls of the round's next policy, or of the next round's first one."""
        while not self._sent:
            if not self._round:
                if not self._waiting or not self._live <= {call.episode for call in self._waiting}:
                    return
                self._begin_round()
            calls = self._round.popleft()
            self._sent.update(calls)
            for call in calls:
                if not call.turn.done():  # Cancelled a moment ago: its end is on its way.
                    call.turn.set_result(None)

    def _begin_round(self) -> None:
        by_policy: dict[PolicyName, list[_Call]] = {policy: [] for policy in self._order}
        for call in self._waiting:
            by_policy[call.policy].append(call)
        self._round.extend(by_policy.values())
        self._waiting = []
