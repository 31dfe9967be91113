"""Runs balancing: looks at the queues again and again, and makes the moves of instances that the rule decides.

  pool's queues ──► rule ──► moves, in parallel ──► the next look
  pool's queues ──► growth ──► a further instance starts, while the queues are looked at
  answered calls ──► demand ──► start allocation, at the end of each rollout

consumes    the load of every policy; tokens and seconds of its answered calls
waits for   requests to be under way, then balance.poll_s; the moves of the look before; an awake pool
produces    moves of instances to other policies, and further instances; the reason of each is in the journal, and the
            loads that it was decided from
unblocked by requests; it sleeps while there are none. If a move fails, the pool replaces a lost instance. If a further
            instance does not start, its policy gets none until the next step
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.notices import StepPlayed
from flexmarl.events.serving_events import (
    BalanceDecided,
    Called,
    GrowthFailed,
    InstanceGrown,
    InstanceReplaced,
    Moved,
    MoveFailed,
)
from flexmarl.inference.growing import GROW, Growth, growth
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.scaling import STARTS, BalanceRule, Demand, Expectation, Loads, Move, PolicyLoad, seconds_of
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName


def in_words(moves: Sequence[Move]) -> tuple[Mapping[str, str], ...]:
    """The moves as `balance_decided` has them."""
    return tuple({"instance": move.instance, "to": move.to, "because": move.because} for move in moves)


@dataclass(slots=True)
class _Mean:
    """Mean of measured seconds."""

    count: int = 0
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds

    def or_else(self, assumed_s: float) -> float:
        return self.sum_s / self.count if self.count else assumed_s


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
        self._swaps, self._starts = _Mean(), _Mean()
        self._starts_of = {policy: _Mean() for policy in slots}
        self._stuck = set[PolicyName]()
        """Policies whose further instance did not start in this step."""
        self._moving = asyncio.Lock()
        self._rollout_ended = asyncio.Event()
        self._configured: Mapping[PolicyName, int] = {}
        """Number of instances of each policy at the start of the run."""
        events.listen(Called, self._called)
        events.listen(Moved, self._made)
        events.listen(InstanceGrown, lambda grown: self._started(grown.instance, grown.seconds))
        events.listen(InstanceReplaced, lambda new: self._started(new.instance, new.seconds))
        events.listen(StepPlayed, self._step_played)

    async def watch(self) -> None:
        """Moves instances until it is cancelled: by the queues, unless `rule` is none, and at the end of a rollout.

        At the end of a rollout they move to the start allocation of the next step.
        """
        self._configured = {policy: len(given) for policy, given in self._pool.given.items()}
        async with asyncio.TaskGroup() as tasks:
            if self._settings.rule != "none":
                tasks.create_task(self._watch_queues(), name="balance/queues")
            if self._settings.grow:
                tasks.create_task(self._watch_room(tasks), name="balance/room")
            tasks.create_task(self._watch_rollouts(), name="balance/start")

    def _step_played(self, played: StepPlayed) -> None:
        """Closes the step's demand, and moves instances to the start allocation of the next step (setting `start`).

        If rollout does not pause, instances move only with `start: by_share`: they do not go back to the configured
        allocation.
        """
        self._demand.step_ended()
        self._stuck.clear()
        if played.pauses or self._settings.start == "by_share":
            self._rollout_ended.set()

    async def _watch_queues(self) -> None:
        before: Loads = {}
        while True:
            await self._pool.until_asked()
            await asyncio.sleep(self._settings.poll_s)
            async with self._moving:
                loads, move_s = self._loads(), self._swap_s
                moves = self._rule.decide(loads, move_s=move_s)
                if moves or (loads != before and any(load.waiting for load in loads.values())):
                    rule = self._settings.rule
                    self._events.emit(BalanceDecided(rule=rule, loads=loads, move_s=move_s, moves=in_words(moves)))
                before = loads
                await self._make(moves)

    async def _watch_room(self, tasks: asyncio.TaskGroup) -> None:
        """Starts further instances in `tasks`, at most one per look. Those that are starting count in the next look."""
        before: Loads = {}
        while True:
            await self._pool.until_asked()
            await asyncio.sleep(self._settings.poll_s)
            await self._pool.until_awake()
            loads = self._loads()
            room = [policy for policy in loads if policy not in self._stuck and self._pool.has_room(policy)]
            decided = growth(loads, room=room)
            if decided or (room and loads != before and any(load.waiting for load in loads.values())):
                grows = decided.policy if decided else ""
                self._events.emit(BalanceDecided(rule=GROW, loads=loads, room=tuple(room), grows=grows))
            if decided:
                tasks.create_task(self._grow(decided), name=f"balance/grow-{decided.policy}")
            before = loads

    async def _watch_rollouts(self) -> None:
        while True:
            await self._rollout_ended.wait()
            self._rollout_ended.clear()
            await self._pool.until_awake()
            async with self._moving:
                await self._make(self._start_moves())

    def _start_moves(self) -> Sequence[Move]:
        rule, loads = self._settings.start, self._loads()
        basis = self._demand.work if rule == "by_share" else self._configured
        moves = STARTS[rule](basis, loads)
        self._events.emit(BalanceDecided(rule=rule, loads=loads, basis=basis, moves=in_words(moves)))
        return moves

    async def _make(self, moves: Sequence[Move]) -> None:
        """Makes the moves in parallel. A move that fails does not stop the others."""
        async with asyncio.TaskGroup() as tasks:
            for move in moves:
                tasks.create_task(self._move(move), name=f"balance/{move.instance}")

    async def _move(self, move: Move) -> None:
        loads = self._loads()
        expected_s = seconds_of(self._swap_s, loads[move.instance.policy], loads[move.to])
        try:
            await self._pool.move(move.instance, to=move.to, because=move.because, expected_s=expected_s)
        except EngineError as error:
            self._events.emit(MoveFailed(because=str(error), instance=move.instance, to=move.to))

    async def _grow(self, decided: Growth) -> None:
        policy = decided.policy
        try:
            await self._pool.grow(policy, because=decided.because, expected_s=self._start_s(policy))
        except EngineError as error:
            self._stuck.add(policy)
            self._events.emit(GrowthFailed(because=str(error), policy=policy))

    @property
    def _swap_s(self) -> float:
        return self._swaps.or_else(self._settings.move_s)

    def _start_s(self, policy: PolicyName) -> float:
        """Expected seconds until a new instance serves: measured for the policy, else for others, else assumed."""
        return self._starts_of[policy].or_else(self._starts.or_else(self._settings.start_s))

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
            kind=self._pool.kind(policy),
            start_s=self._start_s(policy),
            starting=self._pool.growing(policy),
        )

    def _called(self, call: Called) -> None:
        if here := call.sampled_tokens - call.kept_tokens:
            serving_s = call.seconds * call.sampled_tokens / here
            self._demand.answered(call.policy, tokens=call.sampled_tokens, serving_s=serving_s)

    def _made(self, move: Moved) -> None:
        if move.starts:
            self._started(move.became, move.seconds)
        else:
            self._swaps.add(move.seconds)

    def _started(self, instance: InstanceId, seconds: float) -> None:
        for mean in (self._starts, self._starts_of[instance.policy]):
            mean.add(seconds)
