"""Runs balancing: looks at the queues again and again, and makes the moves of instances that the rule decides.

  pool's queues ──► rule ──► moves, in parallel ──► the next look
  answered calls ──► demand ──► start allocation, at the end of each rollout

consumes    the load of every policy; tokens and seconds of its answered calls
waits for   requests to be under way, then balance.poll_s; the moves of the look before; an awake pool
produces    moves of instances to other policies; the reason of each move is in the journal
unblocked by requests; it sleeps while there are none. If a move fails, the pool replaces a lost instance
"""

import asyncio
from collections.abc import Mapping, Sequence

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.notices import StepPlayed
from flexmarl.events.serving_events import Called, Moved, MoveFailed
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.scaling import (
    BalanceRule,
    Demand,
    Expectation,
    Loads,
    Move,
    PolicyLoad,
    moves_back,
    start_moves,
)
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName


class Balancer:
    """Moves the instances of one pool. `events` must be those of that pool."""

    def __init__(
        self,
        pool: InferencePool,
        rule: BalanceRule,
        settings: BalanceSettings,
        events: Events,
        *,
        slots: Mapping[PolicyName, int],
    ) -> None:
        """`slots` gives, by policy, the number of requests that an instance serves at the same time."""
        self._pool, self._rule, self._settings, self._events, self._slots = pool, rule, settings, events, slots
        self._demand = Demand()
        self._moved, self._moving_s = 0, 0.0
        self._moving = asyncio.Lock()
        self._rollout_ended = asyncio.Event()
        self._configured: Mapping[PolicyName, int] = {}
        """Number of instances of each policy at the start of the run."""
        events.listen(Called, self._called)
        events.listen(Moved, self._made)
        events.listen(StepPlayed, self._step_played)

    async def watch(self) -> None:
        """Moves instances until it is cancelled: by the queues, unless `rule` is none, and at the end of a rollout.

        At the end of a rollout they move to the start allocation of the next step.
        """
        self._configured = {policy: len(given) for policy, given in self._pool.given.items()}
        async with asyncio.TaskGroup() as tasks:
            if self._settings.rule != "none":
                tasks.create_task(self._watch_queues(), name="balance/queues")
            tasks.create_task(self._watch_rollouts(), name="balance/start")

    def _step_played(self, played: StepPlayed) -> None:
        """Closes the step's demand, and moves instances to the start allocation of the next step (setting `start`).

        If rollout does not pause, instances move only with `start: by_share`: they do not go back to the configured
        allocation.
        """
        self._demand.step_ended()
        if played.pauses or self._settings.start == "by_share":
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
        """Makes the moves in parallel. A move that fails does not stop the others."""
        async with asyncio.TaskGroup() as tasks:
            for move in moves:
                tasks.create_task(self._move(move), name=f"balance/{move.instance}")

    async def _move(self, move: Move) -> None:
        try:
            await self._pool.move(move.instance, to=move.to, because=move.because, expected_s=self._move_s)
        except EngineError as error:
            self._events.emit(MoveFailed(because=str(error), instance=move.instance, to=move.to))

    @property
    def _move_s(self) -> float:
        return self._moving_s / self._moved if self._moved else self._settings.move_s

    def _loads(self) -> Loads:
        waiting = self._pool.waiting
        running_s = {
            policy: sum(sum(of_one[: self._slots[policy]]) for of_one in ages)
            for policy, ages in self._pool.ages.items()
        }
        return {
            policy: self._load(policy, given, waiting[policy], self._demand.expected(policy, running_s))
            for policy, given in self._pool.given.items()
        }

    def _load(
        self, policy: PolicyName, given: Mapping[InstanceId, int], waiting: int, expected: Expectation | None
    ) -> PolicyLoad:
        """The load of a policy. Requests that an instance has beyond its slots count as waiting."""
        slots = self._slots[policy]
        return PolicyLoad(
            instances={instance: min(count, slots) for instance, count in given.items()},
            waiting=waiting + sum(max(0, count - slots) for count in given.values()),
            slots=slots,
            expected=expected,
        )

    def _called(self, call: Called) -> None:
        if here := call.sampled_tokens - call.kept_tokens:
            serving_s = call.seconds * call.sampled_tokens / here
            self._demand.answered(call.policy, tokens=call.sampled_tokens, serving_s=serving_s)

    def _made(self, move: Moved) -> None:
        self._moved += 1
        self._moving_s += move.seconds
