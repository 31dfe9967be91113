"""An asyncio event loop whose clock jumps to the next timer.

    async def nap() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(nap()) == 3600.0      # returns at once

An idle hour is free, the order of events is the same in every run, and a deadlock is an error that names the waiting
tasks. Threads and sockets are refused: what they do takes real time, which virtual time cannot wait for. `RealTime`
runs what needs them while the clock stands still, and the order of events stays the same.

Where asyncio leaves the order open, this loop fixes it: timers of the same instant fire in the order they were set
(asyncio's heap may swap them), none fires before its instant (asyncio rounds by the clock's resolution), and sets of
tasks iterate in the same order in every process (so a TaskGroup always cancels its tasks in the same order). It cannot
fix one order: `asyncio.as_completed` shuffles bare coroutines by address, so pass it tasks.
"""

import asyncio
import heapq
import itertools
import math
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import Context
from typing import Any, NoReturn, Self, TypeVar

from flexmarl.errors import FlexmarlError

T = TypeVar("T")


class DeadlockError(FlexmarlError):
    """No task can run and no timer will fire; the text names the tasks that wait."""


class VirtualTimeError(FlexmarlError):
    """Something asked virtual time for a thread or a socket."""


class _JumpingSelector(selectors.BaseSelector):
    """Selector that watches nothing: instead of sleeping until the next timer, it moves the clock there."""

    def __init__(self) -> None:
        self.loop: VirtualTimeLoop | None = None
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.loop is not None:  # Before that, it is the pipe that every asyncio loop opens to itself.
            raise VirtualTimeError(f"virtual time has no sockets, but {fileobj!r} was to be watched; use asyncio.Queue")
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[key.fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop is not None
        if timeout is None or timeout > 0:
            self.loop.jump()
        return []

    def get_map(self) -> Any:
        return self._keys


class _Timer(asyncio.TimerHandle):
    """A timer that is ordered by its instant, then by when it was set."""

    __slots__ = ("key",)

    def __init__(self, key: tuple[float, int], callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        super().__init__(key[0], callback, args, loop, context)
        self.key = key

    def __lt__(self, other: Any) -> bool:
        return self.key < other.key


class _Task(asyncio.Task[T]):
    """A task whose hash is its serial number in the loop, not its address."""

    def __init__(self, coro: Any, serial: int, **kwargs: Any) -> None:
        self._serial = serial
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._serial


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop for tests and simulations; its `time()` starts at 0 and counts virtual seconds."""

    _scheduled: list[asyncio.TimerHandle]
    _thread_id: int | None

    def __init__(self) -> None:
        self._now = 0.0
        self._serials = itertools.count()
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = math.ulp(0.0)
        self.set_task_factory(lambda _, coro, **kwargs: _Task(coro, next(self._serials), loop=self, **kwargs))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def jump(self) -> None:
        """Moves the clock to the next timer; called by the selector when nothing is ready."""
        if not self._scheduled or math.isinf(self._scheduled[0].when()):
            self.report_deadlock()
        # The timer itself, not now + (when - now): the difference would lose the last bits.
        self._now = self._scheduled[0].when()
        # asyncio fires what is earlier than now + resolution. One unit in the last place is exactly "not after now";
        # a constant would fire early near 0, and from some 97 days on it would round away and nothing would fire.
        self._clock_resolution = math.ulp(self._now)

    def report_deadlock(self) -> NoReturn:
        """Raises DeadlockError with the names of all waiting tasks."""
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self) if not task.done())
        raise DeadlockError(
            f"deadlock at {self._now:.6g} s: nothing can run; waiting: {', '.join(waiting) or 'nobody'}"
        )

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Sets a timer. It fires after those already set for the same instant."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError("a timer must have an instant, got nan; check the duration that was slept")
        timer = _Timer((when, next(self._serials)), callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]  # asyncio counts cancelled timers by it
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        """Refuses threads."""
        raise VirtualTimeError(
            f"virtual time has no threads, but {func!r} was sent to one; use a coroutine that sleeps"
        )

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Refuses other threads. asyncio calls it from the loop's own: for a dropped async generator, and on Ctrl-C."""
        if self._thread_id not in (None, threading.get_ident()):
            raise VirtualTimeError(f"virtual time has no threads, but one called back with {callback!r}")
        return self.call_soon(callback, *args, context=context)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time, as `asyncio.run` does in real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class RealTime:
    """An event loop in another thread, where coroutines run in real time. It begins at its first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks until the coroutine has ended. Returns its result, or raises its exception."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._begun()).result()

    @contextmanager
    def opened(self, block: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enters and leaves the block in one task, as blocks with tasks of their own require. It sees our errors."""
        entered, left = Future[T](), Future[None]()

        async def hold() -> None:
            try:
                async with block as value:
                    entered.set_result(value)
                    await asyncio.wrap_future(left)
            except BaseException as error:
                if entered.done():
                    raise
                entered.set_exception(error)

        holding = asyncio.run_coroutine_threadsafe(hold(), self._begun())
        value = entered.result()
        try:
            yield value
        except BaseException as error:
            left.set_exception(error)
            wait([holding])
            raise
        left.set_result(None)
        holding.result()

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            made = Future[asyncio.AbstractEventLoop]()
            self._thread = threading.Thread(target=_serve, args=(made,), name="real time", daemon=True)
            self._thread.start()
            self._loop = made.result()
        return self._loop


def _serve(made: "Future[asyncio.AbstractEventLoop]") -> None:
    with asyncio.Runner() as runner:
        made.set_result(runner.get_loop())
        runner.get_loop().run_forever()
