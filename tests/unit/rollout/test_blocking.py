"""User code that keeps the event loop is found, named and told."""

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flexmarl.events.event import Events
from flexmarl.events.run_events import LoopBlocked
from flexmarl.rollout import blocking_watch
from flexmarl.rollout.blocking_watch import BlockingWatch, _without_cpu_s
from flexmarl.simulator.virtual_time import run_virtual

HERE = Path(__file__).name


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def sleepy(seconds):
    time.sleep(seconds)


async def calls_it(seconds):
    sleepy(seconds)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(blocking_watch, "BLOCKED_S", 0.2)
    monkeypatch.setattr(blocking_watch, "STUCK_S", 0.6)
    monkeypatch.setattr(blocking_watch, "BEAT_S", 0.02)


def watched(work):
    """The events and the warnings while `work`, a coroutine, runs beside the beat."""
    events, blocked, warned = Events(), [], []
    events.listen(LoopBlocked, blocked.append)

    async def scenario():
        with BlockingWatch(events, warned.append):
            await asyncio.sleep(0.05)
            await asyncio.create_task(work)
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    return blocked, warned


def test_the_line_of_user_code_that_blocks_is_named_with_its_time(monkeypatch):
    monkeypatch.setattr(blocking_watch, "STUCK_S", 2.0)
    (blocked,), warned = watched(calls_it(0.4))
    assert blocked.place == line_of(sleepy, "time.sleep")
    assert 0.35 < blocked.seconds < 5
    assert warned == []


def test_a_block_that_lasts_is_told_once_while_it_lasts():
    assert watched(calls_it(1.2))[1] == [line_of(sleepy, "time.sleep")]


def test_who_awaits_blocks_nobody():
    assert watched(asyncio.sleep(0.5)) == ([], [])


def test_a_machine_without_a_free_cpu_is_not_blamed_on_user_code(monkeypatch):
    monkeypatch.setattr(blocking_watch, "_without_cpu_s", lambda thread: time.monotonic())
    assert watched(calls_it(0.7)) == ([], [])


def test_the_time_that_a_thread_waits_for_a_cpu_is_known():
    cpus, before = os.sched_getaffinity(0), _without_cpu_s(threading.get_native_id())
    busy = f"import os\nos.sched_setaffinity(0, [{min(cpus)}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        os.sched_setaffinity(0, [min(cpus)])
        try:
            ends = time.thread_time() + 0.3
            while time.thread_time() < ends:
                pass
        finally:
            os.sched_setaffinity(0, cpus)
            other.kill()
    assert _without_cpu_s(threading.get_native_id()) - before > 0.1


def test_code_that_no_callback_of_the_loop_runs_is_not_meant():
    async def made():
        return BlockingWatch(Events(), lambda text: None)

    assert asyncio.run(made())._place() == ""


def test_a_screen_that_fails_ends_nothing():
    def broken(text):
        raise ValueError(text)

    async def scenario():
        watch = BlockingWatch(Events(), broken)
        with watch:
            sleepy(0.9)
            assert watch._thread.is_alive()

    asyncio.run(scenario())


def test_in_virtual_time_nothing_is_watched():
    """Else the journal of a simulated run would depend on the machine."""

    async def scenario():
        events, blocked, warned = Events(), [], []
        events.listen(LoopBlocked, blocked.append)
        with BlockingWatch(events, warned.append):
            await asyncio.sleep(1)
            sleepy(0.9)
            await asyncio.sleep(1)
        return blocked, warned

    assert run_virtual(scenario()) == ([], [])
