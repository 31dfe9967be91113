"""Calls of the pool, from request to answer, and the line in which those wait that no instance has yet."""

import asyncio
import heapq
from dataclasses import dataclass

from flexmarl.inference.continuation import joined, rest_of
from flexmarl.inference.instance import Instance
from flexmarl.inference.observed import CallRecord
from flexmarl.records import Generation, GenerationRequest


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way, and who waits for it."""

    request: GenerationRequest
    """What is left to ask: of a call that was moved, less than its caller asked."""
    number: int
    """Its place in the line; no other call of the pool has it."""
    answer: asyncio.Future[Generation]
    asked_at: float
    """When it lined up first."""
    instance: Instance | None = None
    """None while it waits for one."""
    sent_at: float = 0.0
    over: bool = False
    """Nobody waits for more than what there is of it."""
    waits: bool = False
    part: Generation | None = None
    """What other instances have sampled of the answer."""

    def end(self, generation: Generation) -> None:
        """Hands the answer, with the earlier parts, to the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(self.whole(generation))

    def keep(self, part: Generation) -> None:
        """Goes on after this part, at another instance."""
        self.request = rest_of(self.request, part)
        self.part = self.whole(part)

    def whole(self, generation: Generation) -> Generation:
        """The answer with the earlier parts."""
        return generation if self.part is None else joined(self.part, generation)

    def record(self, generation: Generation) -> CallRecord:
        """What the pool tells of the call, answered now at its instance."""
        assert self.instance is not None
        whole = self.whole(generation)
        kept = 0 if self.part is None else len(self.part.response_ids)
        return CallRecord(
            instance=self.instance.name,
            policy=self.request.policy,
            request_id=self.request.request_id,
            sent_at=self.sent_at,
            waited_s=self.sent_at - self.asked_at if self.part is None else 0.0,
            answered_at=asyncio.get_running_loop().time(),
            prompt_tokens=len(self.request.prompt_ids) - kept,
            sampled_tokens=len(whole.response_ids),
            kept_tokens=kept,
            reused_tokens=generation.reused_tokens,
            version=whole.versions[0].version,
            finish=whole.finish,
        )


class Line:
    """Calls of one policy that wait for an instance, first come first served; one that comes back keeps its place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Call]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, call: Call) -> None:
        """Lines up."""
        call.instance, call.waits = None, True
        self._size += 1
        heapq.heappush(self._heap, (call.number, call))

    def take(self) -> Call:
        """The first in line. Raises IndexError if there is none."""
        while True:
            call = heapq.heappop(self._heap)[1]
            if call.waits:
                self.leave(call)
                return call

    def leave(self, call: Call) -> None:
        """Goes away without having been served; who is not in line is no error."""
        if call.waits:
            call.waits = False
            self._size -= 1
