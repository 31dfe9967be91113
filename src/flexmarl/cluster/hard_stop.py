"""Threads that end the process if user code keeps it from ending: a loop without an await, a stuck thread.

    SIGTERM ──► the run is stopped ──► it ends by itself within seconds (nearly always)
                    └──► it still runs after STOP_WITHIN_S ──► the process is ended, and says where it was stuck
                (a step that may end first, by checkpoint.on_interrupt_s, has its own time)
    the command has ended ──► a thread of a workflow does not end ──► wait EXIT_WITHIN_S, then exit without it
                          ──► an asynchronous generator does not end ──► wait EXIT_WITHIN_S, then cancel it

The end of such a process has the same effect as a kill: the warden ends its workers, and the run can be resumed.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from flexmarl.errors import frame_of

T = TypeVar("T")

STOP_WITHIN_S = 8.0
"""Batch systems kill a process after some ten seconds, without a word about where it was stuck."""
EXIT_WITHIN_S = 2.0
STOPPED = 130
"""Exit code of a stopped run, the same as after Ctrl-C."""


class HardStop:
    """A block that must end within STOP_WITHIN_S of a call of `start_countdown`; otherwise the process is ended."""

    def __init__(self) -> None:
        self.report: Callable[[str], None] = lambda because: None
        """Called with the reason before the process is ended."""
        self._countdown: threading.Event | None = None
        """Set when the present countdown stops."""
        self._ended = False

    def __enter__(self) -> "HardStop":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ended = True
        self.stop_countdown()

    def start_countdown(self) -> None:
        """Notes that the run must end, and starts the countdown, if none is under way. Called in a signal handler."""
        if self._countdown is None and not self._ended:
            self._countdown = threading.Event()
            threading.Thread(target=self._wait, args=(self._countdown,), name="hard-stop", daemon=True).start()

    def stop_countdown(self) -> bool:
        """Stops the countdown: the event loop answers. Returns False if there was none."""
        if self._countdown is None:
            return False
        self._countdown.set()
        self._countdown = None
        return True

    def _wait(self, stopped: threading.Event) -> None:
        if not stopped.wait(STOP_WITHIN_S):
            because = f"it was stopped and did not end within {STOP_WITHIN_S:g} s; {_main_thread_place()}"
            with suppress(Exception):  # `report` writes to a disk, and the run may be stuck on that very disk.
                self.report(because)
            _end_process(f"flexmarl: the run was ended: {because}", STOPPED)


def run_and_leave_threads(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as `asyncio.run` does, but does not wait for threads and generators that a workflow left.

    `asyncio.run` itself waits without limit for threads that were started with `asyncio.to_thread`, and for the
    `finally` blocks of asynchronous generators.
    """

    async def running() -> T:
        try:
            return await main
        finally:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
            # If this task does not end in time, `asyncio.run` cancels it, like every task.
            closing = loop.create_task(loop.shutdown_asyncgens(), name="close-generators")
            await asyncio.wait([closing], timeout=EXIT_WITHIN_S)

    return asyncio.run(running())


def leave_stuck_threads(before: frozenset[threading.Thread], code: int) -> None:
    """Lets the interpreter exit with `code` although threads that are not in `before` do not end.

    Python itself waits without limit for every thread, such as a tool's thread that waits for a server.
    """
    stuck = [one for one in threading.enumerate() if one not in before and not one.daemon]
    if stuck:
        threading.Thread(target=_exit_without, args=(stuck, code), name="leave-stuck-threads", daemon=True).start()


def _exit_without(stuck: list[threading.Thread], code: int) -> None:
    while not _interpreter_ends():
        time.sleep(0.1)
    deadline = time.monotonic() + EXIT_WITHIN_S
    for one in stuck:
        one.join(max(0.0, deadline - time.monotonic()))
    if names := [one.name for one in stuck if one.is_alive()]:
        _end_process(f"flexmarl: ended without waiting for the threads {', '.join(names)}", code)


def _interpreter_ends() -> bool:
    """True if the main thread has left the program and waits for other threads. False in a test that runs a command."""
    frame = frame_of(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or (frame.f_code.co_name, frame.f_code.co_filename) == ("_shutdown", threading.__file__)


def _main_thread_place() -> str:
    frame = frame_of(threading.main_thread().ident)
    if frame is None:
        return "its main thread has ended"
    place = traceback.extract_stack(frame)[-1]
    return f"its main thread is at {place.filename}:{place.lineno}, in {place.name}"


def _end_process(text: str, code: int) -> None:
    with suppress(Exception):
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    os._exit(code)
