"""Runs the calls of one episode: each waits until it may be sent, and none outlives the episode.

consumes     calls of the episode's seats
waits for    whatever holds a call up (a gate); then its answer
produces     answers; an EpisodeError for a call that the end of the episode cuts, or that comes after it
unblocked by the answer, the caller's cancellation, or the end of the episode
"""

import asyncio
from collections.abc import Awaitable, Callable

from flexmarl.agents import Generate
from flexmarl.agents.context import Interrupted, forget
from flexmarl.errors import EpisodeError
from flexmarl.records import Generation, GenerationRequest, PolicyName
from flexmarl.rollout.time_limit import TimeLimit

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
