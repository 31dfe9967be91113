"""Watches an event loop that plays workflows: finds the line of user code that keeps it from all other work.

    loop ──► beat, again and again        a thread ──► no beat for BLOCKED_S ──► the line of user code that runs now

consumes     beats of the loop
waits for    the next look, in a thread of its own
produces     `LoopBlocked`, when the loop goes on; a call of `stuck` if it does not for STUCK_S
unblocked by time
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flexmarl.errors import frame_of, users_line
from flexmarl.events.event import Events
from flexmarl.events.run_events import LoopBlocked

BLOCKED_S = 1.0
"""Time without a beat of the event loop after which the line of user code that runs is looked up."""
STUCK_S = 10.0
"""The same after which it is told at once: the loop may never go on."""
BEAT_S = 0.25
"""Seconds between two beats, and between two looks of the thread."""
_CALLBACK = asyncio.Handle._run.__code__  # pyright: ignore[reportPrivateUsage]
REMEDY = "write `await asyncio.sleep(s)` for time.sleep(s), and `await asyncio.to_thread(f, x)` for a slow f(x)"


class BlockingWatch:
    """A block in which a thread watches whether the loop that it is entered from goes on.

    In virtual time it watches nothing: such a loop may work for long without its clock going on, and a simulated run
    must have the same journal each time.
    """

    def __init__(self, events: Events, stuck: Callable[[str], None]) -> None:
        """`events` get `LoopBlocked` when the loop goes on. `stuck` is called in the thread, with the line."""
        self._events, self._stuck = events, stuck
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._native_thread = threading.get_native_id()
        self._beaten = time.monotonic(), _without_cpu_s(self._native_thread)
        """The last beat, and the seconds until then in which the loop's thread had no CPU."""
        self._blocked: tuple[float, str] = (0.0, "")
        """The last beat before user code blocked the loop; its line."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="blocking-watch", daemon=True)

    def __enter__(self) -> None:
        self._timer = self._loop.call_soon(self._beat)
        if abs(self._loop.time() - time.monotonic()) < BLOCKED_S:  # The clock of every loop but those in virtual time.
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._timer.cancel()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        now, (since, place) = time.monotonic(), self._blocked
        if since == self._beaten[0]:
            self._events.emit(LoopBlocked(place=place, seconds=now - since))
        self._beaten = now, _without_cpu_s(self._native_thread)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _look(self) -> None:
        told = ""
        while not self._ended.wait(BEAT_S):
            since, without_cpu = self._beaten
            late = time.monotonic() - since - (_without_cpu_s(self._native_thread) - without_cpu)
            if late < BLOCKED_S or not (place := self._place()):
                continue
            self._blocked = since, place
            if late >= STUCK_S and place != told:
                told = place
                with suppress(Exception):  # The screen may be closed meanwhile.
                    self._stuck(place)

    def _place(self) -> str:
        """The innermost line of user code that the loop runs now; empty if it runs none."""
        frame, lines = frame_of(self._loop_thread), list[tuple[str, int]]()
        while frame is not None and frame.f_code is not _CALLBACK:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return users_line(lines[::-1]) if frame is not None else ""


def _without_cpu_s(thread: int) -> float:
    """Seconds in which a thread of this process could have run and had no CPU; 0 where the kernel does not say it."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
