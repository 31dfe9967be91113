"""Runs the calls of one policy on its instances.

    call --> line --> router --> instance --> answer
              ^                     |
              '--- unfinished ------'  the instance is lost, or moved

consumes:     calls, and answers
waits for:    an instance with a free place
produces:     one answer per call
unblocked by: an answer, a new instance, or the end of the last one that could come
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.inference.calls import Call, Instance, Line, joined
from flexmarl.inference.instances import Instances, Start
from flexmarl.inference.interface import FIRST_VERSION
from flexmarl.records import FinishReason, Generation, GenerationProgress, InstanceId, unserved

NOT_OPEN = "the pool is not open; requests need `async with pool.open():` around them"


class Dispatch:
    """Gives the calls of one policy to its instances, and reads the answers."""

    def __init__(self, instances: Instances, *, start: Start, awake: asyncio.Event, events: Events) -> None:
        """No call is given to an instance while `awake` is not set."""
        self.line = Line()
        self._instances, self._start, self._awake, self._events = instances, start, awake, events
        self._due = False
        self._closed = False

    def add(self, call: Call) -> None:
        """Adds a call to the line. Calls that are added in one tick of the event loop are given out together."""
        self.line.add(call)
        self.give_out_soon()

    def give_out_soon(self) -> None:
        """Gives out waiting calls at the next tick of the event loop. Called when instances or places have changed."""
        if len(self.line) and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._give_out)

    def close(self) -> None:
        """Refuses all calls that wait, and those that an instance returns from now on."""
        self._closed = True
        self.give_out_soon()

    async def abort(self, call: Call) -> None:
        """Asks the call's instance to end it. A call that no instance has ends at once."""
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
        """An answer with finish `abort`, for a call whose instance is missing or does not answer.

        It has the tokens that the instance has streamed.
        """
        instance = call.instance
        version = FIRST_VERSION if instance is None or instance.lost else instance.version
        return joined(*call.streamed, unserved(call.request, version, FinishReason.ABORT))

    def _give_out(self) -> None:
        self._due = False
        if self._closed or (not self._instances.live and not self._instances.expected):
            self._refuse()
        elif self._awake.is_set():
            self._place()

    def _place(self) -> None:
        """Gives waiting calls to instances with free places: to each instance all its calls in one `generate`."""
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
            instance.running.update((call.request.request_id, now) for call in share)
            undone = {call.request.request_id: call for call in share}
            reading = self._start(self._read(instance, undone), f"read-{name}")
            # Not in the task itself: a task that is cancelled before it begins would never return its calls.
            reading.add_done_callback(lambda _, undone=undone: self._take_back(undone))
            instance.watch(reading)

    def _refuse(self) -> None:
        """Ends all waiting calls, because no instance will serve them."""
        nobody = f"no instance of '{self._instances.policy}' is left: {self._instances.reasons}"
        while len(self.line):
            call = self.line.take()
            because = NOT_OPEN if self._closed else nobody
            if call.over:
                call.end(self.unserved(call))
            elif call.part is not None:  # The caller gets the tokens sampled so far, and accounts for them.
                call.end(unserved(call.request, FIRST_VERSION, FinishReason.ERROR, because))
            elif not call.answer.done():
                call.answer.set_exception(EngineError(because))

    async def _read(self, instance: Instance, undone: dict[str, Call]) -> None:
        """Reads the answers of one instance to `undone`, from which answered calls are removed."""
        try:
            if not instance.hands_over:
                async for generation in instance.engine.generate([call.request for call in undone.values()]):
                    if isinstance(generation, GenerationProgress):
                        await instance.acknowledged(generation.part)
                        undone[generation.request_id].stream(generation.part)
                        continue
                    await instance.acknowledged(generation)
                    self._answered(undone.pop(generation.request_id), generation)
                if undone:
                    self._instances.lose(instance.name, f"it left {len(undone)} requests without an answer")
        except Exception as error:
            # Any error of an engine costs the engine, not the run.
            self._instances.lose(instance.name, f"{type(error).__name__}: {error}")

    def _take_back(self, undone: Mapping[str, Call]) -> None:
        """Puts the calls that an instance did not answer back into the line."""
        for call in undone.values():
            self._freed(call)
            call.keep_streamed()
            self.add(call)

    def _answered(self, call: Call, generation: Generation) -> None:
        """Ends a call with its answer, or keeps the answer as a part if the call continues at another instance."""
        instance = self._freed(call)
        wanted = not call.over and not call.answer.done()
        if instance.hands_over and generation.finish is FinishReason.ABORT and wanted:
            call.keep(generation)
            self.add(call)
        else:
            call.end(generation)
            self._events.emit(call.answered(generation, self._events))

    def _freed(self, call: Call) -> Instance:
        """Frees the call's place at its instance, for calls that wait. Returns the instance."""
        assert call.instance is not None
        call.instance.running.pop(call.request.request_id, None)
        self._instances.router.finish(call.instance.name, call.request.sampling.max_tokens)
        self.give_out_soon()
        return call.instance
