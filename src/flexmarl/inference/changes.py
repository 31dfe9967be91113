"""Runs what changes the number of a policy's instances on purpose: moves, growths, and the search for missed room.

    move        of one policy --> of another           a rule has decided it, or a policy has lost its last instance
    grow        free room     --> one more instance    a rule has decided it
    make_room   one more      --> free room            a replacement has no other room: further instances go first

consumes:     decisions, and replacements that look for room
waits for:    instances that leave, load and start (moving.py)
produces:     instances under new names, and an event with the reason for each change
unblocked by: the end of the change under way; only one search for room goes on at a time
"""

import asyncio
from collections.abc import Callable, Mapping

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.events.serving_events import InstanceGrown, InstanceRetired, Moved
from flexmarl.inference.calls import Instance
from flexmarl.inference.growing import first_to_go
from flexmarl.inference.instances import EngineRoom, Instances, Start
from flexmarl.inference.moving import InstanceGrowth, InstanceMove, InstanceRetirement
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import InstanceId, PolicyName, WorkerId


class InstanceChanges:
    """The changes of one pool's instances."""

    def __init__(
        self,
        policies: Mapping[PolicyName, Instances],
        room: EngineRoom,
        settings: PoolSettings,
        *,
        start: Start,
        awake: asyncio.Event,
        waiting: Callable[[], Mapping[PolicyName, int]],
        events: Events,
    ) -> None:
        """`waiting` returns the number of requests that wait for an instance, by policy."""
        self._policies, self._room, self._settings = policies, room, settings
        self._start, self._awake, self._waiting, self._events = start, awake, waiting, events
        self._making_room = asyncio.Lock()
        self._growths: set[asyncio.Future[None]] = set()
        self._became: dict[InstanceId, InstanceId] = {}

    def now(self, instance: InstanceId) -> InstanceId:
        """The id that an instance has now, from any that it had before a move."""
        while instance in self._became:
            instance = self._became[instance]
        return instance

    async def move(
        self, instance: InstanceId, source: Instances, target: Instances, because: str, expected_s: float
    ) -> InstanceId:
        """See `InferencePool.move`."""
        if because_not := self._hindrance(source, target, instance):
            raise EngineError(f"'{instance}' cannot be moved to '{target.policy}': {because_not}")
        move = self._move_of(instance, target)
        moving = self._run_move(move, instance, target.policy, because, expected_s)
        await asyncio.wait([self._start(moving, f"move-{instance}")])
        if move.failure:
            raise EngineError(f"'{instance}' was not moved to '{target.policy}': {move.failure}")
        assert move.became is not None
        return move.became

    async def grow(self, target: Instances, because: str, expected_s: float) -> InstanceId:
        """See `InferencePool.grow`."""
        policy = target.policy
        if not (target.published and target.can_start and self._awake.is_set() and self._room.has_room(policy)):
            because_not = "there is no room, no published weights, or the pool is asleep"
            raise EngineError(f"'{policy}' cannot have one more instance: {because_not}")
        growth = InstanceGrowth(target)
        started = self._start(self._run_growth(growth, because, expected_s), f"grow-{policy}")
        self._growths.add(started)
        started.add_done_callback(self._growths.discard)
        await asyncio.wait([started])
        if growth.became is None:
            raise EngineError(f"'{policy}' did not get one more instance: {growth.failure}")
        return growth.became

    async def make_room(self, policy: PolicyName) -> bool:
        """Ends further instances, one after the other, while a replacement of the policy has no room and that helps.

        If there is no room and the policy has no instance left, one of another policy moves to it: returns True then.
        """
        target = self._policies[policy]
        async with self._making_room:
            while not self._room.has_room(policy):
                if first := self._first_to_go(policy):
                    await self._retire(first, f"a replacement for a lost instance of '{policy}' has no other room")
                elif self._growths:
                    await asyncio.wait(self._growths, return_when=asyncio.FIRST_COMPLETED)
                elif not target.live and (donor := self._donor(target)):
                    because = f"'{policy}' has lost its last instance, and another one has no room"
                    await self._run_move(self._move_of(donor, target), donor, policy, because, 0.0)
                    if target.live:
                        return True
                else:
                    return False
        return False

    def _hindrance(self, source: Instances, target: Instances, instance: InstanceId) -> str:
        """The reason why the instance cannot move now; empty if it can."""
        if source is target:
            return "it serves that policy already"
        if not target.published:
            return "that policy has published no weights that it could load"
        if not self._awake.is_set():
            return "the pool is asleep"
        if instance not in source.live:  # `leave` raises the error.
            return ""
        engine = source.live[instance]
        if self._room.kind(source.policy) == self._room.kind(target.policy):
            return "" if engine.capabilities.loads_weights else "its engine does not load weights"
        if not target.can_start or not self._room.has_room(target.policy, without=[engine.engine]):
            return "its engine cannot load weights of that policy, and another one has no room in its place"
        return ""

    async def _run_move(
        self, move: InstanceMove, instance: InstanceId, to: PolicyName, because: str, expected_s: float
    ) -> None:
        began = self._events.now()
        await move.run()
        if move.became is not None and not move.starts:  # A new engine's process has a name of its own.
            self._became[instance] = move.became
        if move.became is not None and not move.failure:
            self._events.emit(
                Moved(
                    process=WorkerId.engine(move.became),
                    began=began,
                    instance=instance,
                    to=to,
                    became=move.became,
                    expected_s=expected_s,
                    starts=move.starts,
                    because=because,
                )
            )

    async def _run_growth(self, growth: InstanceGrowth, because: str, expected_s: float) -> None:
        began = self._events.now()
        await growth.run()
        if (grown := growth.became) is not None and grown in self._policies[grown.policy].live:
            self._events.emit(
                InstanceGrown(
                    process=WorkerId.engine(grown),
                    began=began,
                    instance=grown,
                    version=self._policies[grown.policy].live[grown].version,
                    expected_s=expected_s,
                    because=because,
                )
            )

    async def _retire(self, name: InstanceId, because: str) -> None:
        began, source = self._events.now(), self._policies[name.policy]
        retiring = source.leave(name)
        if not retiring.grown:  # The further instance has to stay, because it is its policy's last one, or moves.
            self._further[0].grown, retiring.grown = False, True
        retirement = InstanceRetirement(retiring, source, self._settings)
        await retirement.run()
        if not retirement.failure:
            event = InstanceRetired(process=WorkerId.engine(name), began=began, instance=name, because=because)
            self._events.emit(event)

    @property
    def _further(self) -> list[Instance]:
        """The instances that the run has beyond the configured ones, moving ones too."""
        every = [one for of in self._policies.values() for one in (*of.live.values(), *of.leaving.values())]
        return [instance for instance in every if instance.grown]

    def _first_to_go(self, policy: PolicyName) -> InstanceId | None:
        """The instance whose end makes room for one of `policy`, a further one if possible; None if there is none."""
        can_go = [
            instance
            for instances in self._policies.values()
            for instance in instances.live.values()
            if len(instances.live) > 1 and self._room.has_room(policy, without=[instance.engine])
        ]
        further = [instance for instance in can_go if instance.grown] or (can_go if self._further else [])
        return first_to_go({instance.name: len(instance.running) for instance in further}, self._waiting())

    def _donor(self, target: Instances) -> InstanceId | None:
        """The instance of another policy whose move to `target` is missed least; None if none can move."""
        can_move = {
            instance.name: len(instance.running)
            for source in self._policies.values()
            for instance in source.live.values()
            if len(source.live) > 1 and not self._hindrance(source, target, instance.name)
        }
        return first_to_go(can_move, self._waiting())

    def _move_of(self, instance: InstanceId, target: Instances) -> InstanceMove:
        """Takes an instance out of its policy for a move. Raises EngineError if it is not live, or the last one."""
        source = self._policies[instance.policy]
        starts = self._room.kind(source.policy) != self._room.kind(target.policy)
        return InstanceMove(source.leave(instance), source, target, self._settings, starts=starts)
