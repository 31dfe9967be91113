"""An asyncio event loop whose clock jumps to the next timer.

    async def nap() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(nap()) == 3600.0      # returns at once

An idle hour is free, the order of events is the same in every run, and a deadlock is an error that names the waiting
tasks. Threads are refused: what they do takes real time, which virtual time cannot wait for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from flexmarl.errors import FlexmarlError

T = TypeVar("T")


class DeadlockError(FlexmarlError):
    """No task can run and no timer is set; the text names the tasks that wait."""


class VirtualTimeError(FlexmarlError):
    """Something asked virtual time for a thread or a socket."""


class _JumpingSelector(selectors.BaseSelector):
    """Selector on nothing: instead of sleeping until the next timer, it moves the clock there."""

    def __init__(self) -> None:
        self.loop: VirtualTimeLoop | None = None
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop is not None
        if timeout is None:
            self.loop.report_deadlock()
        self.loop.advance(timeout)
        return []

    def get_map(self) -> Any:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop for tests and simulations; its `time()` starts at 0 and counts virtual seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock; called by the selector when nothing is ready."""
        if seconds > 0:
            # The timer itself, not now + (when - now): the difference would lose the last bits.
            scheduled = getattr(self, "_scheduled", [])
            self._now = max(self._now, scheduled[0].when()) if scheduled else self._now + seconds

    def report_deadlock(self) -> NoReturn:
        """Raises DeadlockError with the names of all tasks that can never go on."""
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self) if not task.done())
        raise DeadlockError(f"deadlock at {self._now:.6g} s: nothing can run; waiting: {', '.join(waiting) or 'nobody'}")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        """Refuses threads."""
        raise VirtualTimeError(f"virtual time has no threads, but {func!r} was sent to one; use a coroutine that sleeps")

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses threads."""
        raise VirtualTimeError("virtual time has no threads, but call_soon_threadsafe was called")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time, as `asyncio.run` does in real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
