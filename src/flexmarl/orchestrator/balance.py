"""Runs balancing: looks at the queues now and then, and moves instances to where the rule wants them.

  pool's queues ──► rule ──► moves, side by side ──► the next look
  answered calls ──► demand ──► start allocation, at the end of each rollout

consumes    the load of every policy, and what its answered calls were like
waits for   requests to be under way, then balance.poll_s; the moves of the look before; an awake pool
produces    instances of other policies, the reason for each in the journal
unblocked by requests; while there are none it sleeps. A move that fails is the pool's: the instance is replaced
"""

import asyncio
from collections.abc import Mapping, Sequence

from flexmarl.errors import EngineError
from flexmarl.events.hub import Events
from flexmarl.events.serving_events import Called, Moved, MoveFailed
from flexmarl.inference.demand import Demand
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.scaling import BalanceRule, Loads, Move, PolicyLoad, moves_back, start_moves
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName


class Balancer:
    """Moves instances of one pool. It listens to the events of that pool."""

    def __init__(
        self,
        pool: InferencePool,
        rule: BalanceRule,
        settings: BalanceSettings,
        events: Events,
        *,
        slots: Mapping[PolicyName, int],
    ) -> None:
        """`slots` are the requests that an instance of each policy serves at a time."""
        self._pool, self._rule, self._settings, self._events, self._slots = pool, rule, settings, events, slots
        self._demand = Demand()
        self._moved, self._moving_s = 0, 0.0
        self._moving = asyncio.Lock()
        self._rollout_ended = asyncio.Event()
        self._configured: Mapping[PolicyName, int] = {}
        """Instances at the beginning."""
        events.listen(Called, self._called)
        events.listen(Moved, self._made)

    async def watch(self) -> None:
        """Looks and moves until it is cancelled."""
        self._configured = {policy: len(given) for policy, given in self._pool.given.items()}
        async with asyncio.TaskGroup() as tasks:
            if self._settings.rule != "none":
                tasks.create_task(self._watch_queues(), name="balance/queues")
            tasks.create_task(self._watch_rollouts(), name="balance/start")

    def rollout_ended(self, *, pauses: bool = True) -> None:
        """What the step asked for is known; instances go where `start` wants them for the next one.

        Where rollout does not pause, there is no start, and no way back to what was configured.
        """
        self._demand.step_ended()
        if pauses or self._settings.start == "by_share":
            self._rollout_ended.set()

    async def _watch_queues(self) -> None:
        while True:
            await self._pool.until_asked()
            await asyncio.sleep(self._settings.poll_s)
            async with self._moving:
                await self._make(self._rule.decide(self._loads(), move_s=self._move_s))

    async def _watch_rollouts(self) -> None:
        while True:
            await self._rollout_ended.wait()
            self._rollout_ended.clear()
            await self._pool.until_awake()
            async with self._moving:
                await self._make(self._start_moves())

    def _start_moves(self) -> Sequence[Move]:
        if self._settings.start == "by_share":
            return start_moves(self._demand.work, self._loads())
        return moves_back(self._configured, self._loads())

    async def _make(self, moves: Sequence[Move]) -> None:
        """Side by side; those that fail are no reason not to make the others."""
        async with asyncio.TaskGroup() as tasks:
            for move in moves:
                tasks.create_task(self._move(move), name=f"balance/{move.instance}")

    async def _move(self, move: Move) -> None:
        try:
            await self._pool.move(move.instance, to=move.to, because=move.because)
        except EngineError as error:
            self._events.emit(MoveFailed(because=str(error), instance=move.instance, to=move.to))

    @property
    def _move_s(self) -> float:
        return self._moving_s / self._moved if self._moved else self._settings.move_s

    def _loads(self) -> Loads:
        waiting = self._pool.waiting
        return {policy: self._load(policy, given, waiting[policy]) for policy, given in self._pool.given.items()}

    def _load(self, policy: PolicyName, given: Mapping[InstanceId, int], waiting: int) -> PolicyLoad:
        """What an instance was given beyond its slots waits in its engine."""
        slots = self._slots[policy]
        return PolicyLoad(
            instances={instance: min(count, slots) for instance, count in given.items()},
            waiting=waiting + sum(max(0, count - slots) for count in given.values()),
            slots=slots,
            expected=self._demand.expected(policy),
        )

    def _called(self, call: Called) -> None:
        if here := call.sampled_tokens - call.kept_tokens:
            serving_s = call.seconds * call.sampled_tokens / here
            self._demand.answered(call.policy, tokens=call.sampled_tokens, serving_s=serving_s)

    def _made(self, move: Moved) -> None:
        self._moved += 1
        self._moving_s += move.seconds
