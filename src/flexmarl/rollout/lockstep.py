"""Runs the calls of one group in lockstep: its episodes take their turns together, one policy after another.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from flexmarl.agents import Generate
from flexmarl.agents.context import Interrupted, forget
from flexmarl.records import Generation, GenerationRequest, PolicyName


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
