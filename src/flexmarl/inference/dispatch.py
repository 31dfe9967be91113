"""Runs the calls of one policy on its instances.

    call --> line --> router --> instance --> answer
              ^                     |
              '--- unfinished ------'  the instance is lost, or moved

consumes:     calls, and answers
waits for:    an instance with a place
produces:     one answer per call
unblocked by: an answer, an instance that came, or the knowledge that none will come
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from flexmarl.errors import EngineError
from flexmarl.events.hub import Events
from flexmarl.inference.calls import Call, Instance, Line
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.instances import Instances, Start
from flexmarl.records import FinishReason, Generation, InstanceId, unserved

NOT_OPEN = "the pool is not open; requests need `async with pool.open():` around them"


class Dispatch:
    """The line of one policy, and who reads its instances' answers."""

    def __init__(self, instances: Instances, *, start: Start, awake: asyncio.Event, events: Events) -> None:
        """While `awake` is not set, nothing is given out."""
        self.line = Line()
        self._instances = instances
        self._start = start
        self._awake = awake
        self._events = events
        self._due = False
        self._closed = False

    def add(self, call: Call) -> None:
        """The call waits for an instance; those of one tick go out together."""
        self.line.add(call)
        self.give_out_soon()

    def give_out_soon(self) -> None:
        """Called when something has changed for those who wait."""
        if len(self.line) and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._give_out)

    def close(self) -> None:
        """Refuses all that wait, and those who come back from an instance."""
        self._closed = True
        self.give_out_soon()

    async def abort(self, call: Call) -> None:
        """Has the instance end the call; one that is with no instance ends at once."""
        instance = call.instance
        if instance is None or instance.lost:
            self.line.leave(call)
            call.end(self.unserved(call))
            return
        try:
            await instance.engine.abort([call.request.request_id])
        except EngineError as error:
            self._instances.lose(instance.name, f"aborting failed: {error}")

    def unserved(self, call: Call) -> Generation:
        """What an instance would answer, where there is none, or none that answers to an abort."""
        instance = call.instance
        version = FIRST_VERSION if instance is None or instance.lost else instance.version
        return unserved(call.request, version, FinishReason.ABORT)

    def _give_out(self) -> None:
        self._due = False
        if self._closed or (not self._instances.live and not self._instances.expected):
            self._refuse()
        elif self._awake.is_set():
            self._place()

    def _place(self) -> None:
        """Each instance gets its share in one call."""
        shares: dict[InstanceId, list[Call]] = defaultdict(list)
        now, router = asyncio.get_running_loop().time(), self._instances.router
        while len(self.line) and router.has_place:
            call = self.line.take()
            if call.over:
                call.end(self.unserved(call))
            if not call.answer.done():
                name = router.place(call.request.sampling.max_tokens, call.request.conversation).instance
                call.instance, call.sent_at = self._instances.live[name], now
                shares[name].append(call)
        for name, share in shares.items():
            instance = self._instances.live[name]
            instance.running.update(call.request.request_id for call in share)
            undone = {call.request.request_id: call for call in share}
            reading = self._start(self._read(instance, undone), f"read-{name}")
            # Not in the task itself: one that is cancelled before it begins would keep them.
            reading.add_done_callback(lambda _, undone=undone: self._take_back(undone))
            instance.watch(reading)

    def _refuse(self) -> None:
        """Nobody will ever serve them."""
        nobody = f"no instance of '{self._instances.policy}' is left: {self._instances.reasons}"
        while len(self.line):
            call = self.line.take()
            because = NOT_OPEN if self._closed else nobody
            if call.over:
                call.end(self.unserved(call))
            elif call.part is not None:  # Its tokens are not lost with the instance: the caller accounts for them.
                call.end(unserved(call.request, FIRST_VERSION, FinishReason.ERROR, because))
            elif not call.answer.done():
                call.answer.set_exception(EngineError(because))

    async def _read(self, instance: Instance, undone: dict[str, Call]) -> None:
        """Runs one batch of an instance to its end; what remains in `undone` the instance has not answered."""
        try:
            if not instance.hands_over:
                async for generation in instance.engine.generate([call.request for call in undone.values()]):
                    await instance.acknowledged(generation)
                    self._answered(undone.pop(generation.request_id), generation)
                if undone:
                    self._instances.lose(instance.name, f"it left {len(undone)} requests without an answer")
        except Exception as error:
            # Whatever an engine raises, it is the engine that is lost, not the run.
            self._instances.lose(instance.name, f"{type(error).__name__}: {error}")

    def _take_back(self, undone: Mapping[str, Call]) -> None:
        """What an instance has left undone goes to another one."""
        for call in undone.values():
            self._freed(call)
            self.add(call)

    def _answered(self, call: Call, generation: Generation) -> None:
        """The caller's answer; or a part of it, where the call goes on elsewhere."""
        instance = self._freed(call)
        wanted = not call.over and not call.answer.done()
        if instance.hands_over and generation.finish is FinishReason.ABORT and wanted:
            call.keep(generation)
            self.add(call)
        else:
            call.end(generation)
            self._events.emit(call.answered(generation, self._events))

    def _freed(self, call: Call) -> Instance:
        """Its instance has a place again, for who waits."""
        assert call.instance is not None
        call.instance.running.discard(call.request.request_id)
        self._instances.router.finish(call.instance.name, call.request.sampling.max_tokens)
        self.give_out_soon()
        return call.instance
