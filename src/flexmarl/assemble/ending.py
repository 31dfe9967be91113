"""Runs a command up to its end: its last step, a lost worker, a callback that raises, or someone who stops it.

  Ctrl-C, SIGTERM,      first    the step under way is finished and saved, if that takes at most
  `Supervisor.stop`                checkpoint.on_interrupt_s; then the command ends
                        second   the command is cancelled at once; so is it where nothing would be saved

consumes    signals; calls of `stop` from any thread; events, for the callbacks
waits for   the orchestrator
produces    the end of the command, and its reason in the journal
unblocked by the orchestrator, the time limit, or the process's end if the event loop is stuck (hard_stop.py)
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from flexmarl.cluster.hard_stop import HardStop
from flexmarl.errors import ConfigError, FlexmarlError, described, text_of
from flexmarl.events.event import Event, Events, Notice
from flexmarl.events.run_events import MonitorFailed, RunFailed
from flexmarl.orchestrator.run import StopRequest

Callbacks = Mapping[type[Notice], Callable[[Any], object]]
"""Functions of a user by the type of event that they are called with; a base type stands for all below it."""
T = TypeVar("T")


class Supervisor:
    """Whoever started a command: its functions are called with events, and it may end the command from any thread."""

    def __init__(self, on: Callbacks | None = None) -> None:
        """Raises ConfigError if a key of `on` is no type of events, or a value cannot be called."""
        check_callbacks(on or {})
        self._on: Callbacks = on or {}
        self.request = StopRequest()
        """The orchestrator ends at the next step boundary after it is made."""
        self._within_s = 0.0
        self._say: Callable[[str], None] = lambda because: None
        self._hard: HardStop | None = None
        self._calls = 0
        self._cancelled = self._counted = self._polled = False
        self._limit: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def listen(self, events: Events) -> "asyncio.Future[None]":
        """Calls the functions with the events of their types, from now on. Call it inside the event loop.

        The returned future fails with the first of their errors, named; no function is called after that. It never
        succeeds. The error does not pass through `emit`: the part that emitted the event has no share in it.
        """
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Otherwise asyncio prints an error that nobody asked for, if another one ended the run first.
        failed.add_done_callback(lambda future: future.cancelled() or future.exception())
        for kind, function in self._on.items():
            events.listen(kind, partial(_call, failed, kind, function))
        return failed

    @contextmanager
    def stoppable(self, *, at_events_of: Events | None = None) -> Iterator[None]:
        """Lets `stop` end the block, which the command's task enters. It then ends with KeyboardInterrupt.

        With `at_events_of`, it ends at the next event: virtual time refuses calls from other threads.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._polled = at_events_of is not None
        if at_events_of is not None:
            at_events_of.listen(Event, lambda _: self._cancel() if self._calls else None)
        if self._calls:  # Stopped before it began.
            self._cancel()
        try:
            yield
        except asyncio.CancelledError:
            if self._cancelled:
                raise KeyboardInterrupt from None
            raise
        finally:
            self._loop = None

    @contextmanager
    def on_signals(self, hard: HardStop) -> Iterator[None]:
        """Lets Ctrl-C and SIGTERM do what `stop` does in the block. SIGTERM also starts the countdown of `hard`.

        Entered after Ray's start, whose own handler of SIGTERM ends the process at once. Signals reach the main thread
        only: in any other thread, there is just `stop`.
        """
        self._hard, before = hard, dict[int, Any]()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                # Started in the background of a script, a run has Ctrl-C ignored.
                if number == signal.SIGTERM or handler is not signal.SIG_IGN:
                    before[number] = signal.signal(number, partial(self._signalled, handler))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: it was set by no Python code

    @contextmanager
    def after_the_step(self, within_s: float, say: Callable[[str], None]) -> Iterator[None]:
        """Lets the first `stop` in the block wait for the step under way, for `within_s` seconds; 0: not at all.

        `say` is called with who stopped it. The block must end after a step if `request` is made.
        """
        self._within_s, self._say = within_s, say
        try:
            yield
        finally:
            self._within_s = 0.0
            if self._limit:
                self._limit.cancel()
            if self._hard and self._counted:
                self._hard.start_countdown()

    def stop(self, because: str) -> None:
        """Ends the command, from any thread: the first call after the step under way, the second at once."""
        gentle, loop = self._gentle, self._loop
        self._calls += 1
        if loop is not None and not self._polled:
            with suppress(RuntimeError):  # The loop has just been closed: the command has ended.
                loop.call_soon_threadsafe(partial(self._ask, because) if gentle else self._cancel)

    @property
    def _gentle(self) -> bool:
        """True if the next call of `stop` lets the step under way end."""
        return not self._calls and self._within_s > 0

    def _signalled(self, before: Any, number: int, frame: FrameType | None) -> None:
        """Handles a signal. It may interrupt any code, so it only leaves word with the event loop."""
        if self._hard and number == signal.SIGTERM:
            self._hard.start_countdown()
        if number == signal.SIGINT and callable(before) and not self._gentle:
            self._calls += 1
            before(number, frame)  # asyncio's: it cancels the command; called again, it raises KeyboardInterrupt here.
        else:
            self.stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    def _ask(self, because: str) -> None:
        self._counted = self._hard is not None and self._hard.stop_countdown()  # The event loop works.
        self._say(because)
        self.request.make(because)
        assert self._loop is not None
        self._limit = self._loop.call_later(self._within_s, self._too_late)

    def _too_late(self) -> None:
        if self._hard and self._counted:
            self._hard.start_countdown()
        self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and self._loop is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()


@contextmanager
def recorded_failure(events: Events) -> Iterator[None]:
    """Records an exception that ends the block in the journal."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # On a full disk, say, which then is what ended the run.
            events.emit(RunFailed(because=f"{type(error).__name__}: {text_of(error)}"))
        raise


def check_callbacks(on: Callbacks) -> None:
    """Raises ConfigError if a key is no type of events, or a value cannot be called."""
    for kind, function in on.items():
        if not (isinstance(kind, type) and issubclass(kind, Notice)):
            raise ConfigError(f"on: {kind!r} is no type of events; use one, e.g. flexmarl.events.run_events.StepEnded")
        if not callable(function):
            raise ConfigError(f"on[{kind.__name__}] must be a function of one argument, the event, got {function!r}")
        if asyncio.iscoroutinefunction(function):
            raise ConfigError(f"on[{kind.__name__}] is an async function, which nothing would await; use a plain one")


def _call(failed: "asyncio.Future[None]", kind: type[Notice], function: Callable[[Any], object], event: Notice) -> None:
    if failed.done():
        return
    try:
        function(event)
    except (Exception, SystemExit) as error:
        name = getattr(function, "__qualname__", repr(function))
        problem = FlexmarlError(f"the callback on[{kind.__name__}], {name}, raised {described(error)}")
        problem.__cause__ = error
        failed.set_exception(problem)


async def run_until_lost(
    orchestrator_run: Coroutine[Any, Any, T],
    *,
    watch: Coroutine[Any, Any, None],
    lost: Sequence["asyncio.Future[None]"],
    events: Events,
) -> T:
    """Awaits the run while the monitor watches, and returns its result. Raises as soon as one of `lost` does."""
    run = asyncio.create_task(orchestrator_run, name="orchestrator")
    watching = asyncio.create_task(watch, name="monitor")
    try:
        await asyncio.wait([run, *lost], return_when=asyncio.FIRST_COMPLETED)
        for one in lost:
            if one.done():
                one.result()
        return await run
    finally:
        for task in (run, watching):
            task.cancel()
        _, ended = await asyncio.gather(run, watching, return_exceptions=True)
        if isinstance(ended, Exception):
            events.emit(MonitorFailed(because=f"{type(ended).__name__}: {ended}"))
