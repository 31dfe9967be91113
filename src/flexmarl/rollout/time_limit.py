"""Runs the clock of one episode's time limit, which stands still while something holds up its calls.

consumes     the seconds that the episode may take
waits for    nothing
produces     a TimeoutError in the block that it is around
unblocked by time, but for the time in which a call is held
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


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
