import asyncio
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.simulator.virtual_time import DeadlockError, VirtualTimeError, VirtualTimeLoop, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_idle_year_is_free_and_exact():
    async def sleep_a_year() -> float:
        for _ in range(365):
            await asyncio.sleep(86_400.5)
        return now()

    assert run_virtual(sleep_a_year()) == 365 * 86_400.5


@given(st.lists(st.floats(min_value=0, max_value=1e12), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_every_timer_fires_at_its_very_instant_in_order(instants):
    async def main() -> list[tuple[float, float]]:
        fired = []
        loop = asyncio.get_running_loop()
        for instant in instants:
            loop.call_at(instant, lambda instant=instant: fired.append((instant, now())))
        await asyncio.sleep(2e12)
        return fired

    assert run_virtual(main()) == [(instant, instant) for instant in sorted(instants)]


def test_timers_a_billionth_apart_keep_their_distance():
    async def main() -> list[float]:
        seen = []
        loop = asyncio.get_running_loop()
        loop.call_at(5e-10, lambda: seen.append(now()))
        loop.call_at(6e-10, lambda: seen.append(now()))
        await asyncio.sleep(1)
        return seen

    assert run_virtual(main()) == [5e-10, 6e-10]


@given(st.lists(st.integers(min_value=0, max_value=3), max_size=60))
@settings(max_examples=100, deadline=None)
def test_timers_of_one_instant_fire_in_the_order_they_were_set(delays):
    async def main() -> list[int]:
        order = []
        loop = asyncio.get_running_loop()
        for index, delay in enumerate(delays):
            loop.call_later(delay, order.append, index)
        await asyncio.sleep(10)
        return order

    assert run_virtual(main()) == sorted(range(len(delays)), key=lambda index: delays[index])


@pytest.mark.parametrize("cancelled", [1, 500])
def test_the_clock_does_not_stop_at_cancelled_timers(cancelled):
    async def main() -> float:
        loop = asyncio.get_running_loop()
        handles = [loop.call_at(index / 1000, pytest.fail, "fired") for index in range(cancelled)]
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(7)
        return now()

    assert run_virtual(main()) == 7


def test_a_timer_may_be_cancelled_by_another_of_the_same_instant():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        late = None
        loop.call_at(1, lambda: late.cancel())
        late = loop.call_at(1, pytest.fail, "fired")
        await asyncio.sleep(1)
        return now()

    assert run_virtual(main()) == 1


def test_negative_delays_fire_at_once_and_never_turn_the_clock_back():
    async def main() -> list[float]:
        seen = []
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        loop.call_later(-3, lambda: seen.append(now()))
        await asyncio.sleep(-1)
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(1), timeout=-1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(-1):
                await asyncio.sleep(1)
        return [*seen, now()]

    assert run_virtual(main()) == [5, 5]


def test_a_timer_without_an_instant_is_refused():
    with pytest.raises(ValueError, match="nan"):
        run_virtual(asyncio.sleep(math.nan))


def test_timeouts_and_nested_timeouts_end_at_their_deadline():
    async def main() -> list[float]:
        ends = []
        try:
            async with asyncio.timeout(10):
                try:
                    async with asyncio.timeout(3):
                        await asyncio.Event().wait()
                except TimeoutError:
                    ends.append(now())
                await asyncio.Event().wait()
        except TimeoutError:
            ends.append(now())
        async with asyncio.timeout(3):
            await asyncio.sleep(2)
        return [*ends, now()]

    assert run_virtual(main()) == [3, 10, 12]


def test_a_bounded_queue_slows_its_producer():
    async def main() -> list[tuple[str, int, float]]:
        log: list[tuple[str, int, float]] = []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def produce() -> None:
            for item in range(3):
                await queue.put(item)
                log.append(("put", item, now()))

        async def consume() -> None:
            for _ in range(3):
                await asyncio.sleep(10)
                log.append(("got", await queue.get(), now()))

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        return log

    assert run_virtual(main()) == [
        ("put", 0, 0), ("got", 0, 10), ("put", 1, 10), ("got", 1, 20), ("put", 2, 20), ("got", 2, 30),
    ]  # fmt: skip


def test_a_condition_wakes_its_waiters_in_order():
    async def main() -> list[tuple[int, float]]:
        woken = []
        condition = asyncio.Condition()

        async def wait(index: int) -> None:
            async with condition:
                await condition.wait()
                woken.append((index, now()))

        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(wait(index))
            await asyncio.sleep(1)
            async with condition:
                condition.notify(1)
            await asyncio.sleep(1)
            async with condition:
                condition.notify_all()
        return woken

    assert run_virtual(main()) == [(0, 1), (1, 2), (2, 2), (3, 2)]


def test_a_failing_task_ends_its_group_at_that_instant():
    async def main() -> float:
        async def fail() -> None:
            await asyncio.sleep(2)
            raise KeyError("two")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(1000))
        except* KeyError:
            failed_at.append(now())
        return now()

    failed_at: list[float] = []
    assert run_virtual(main()) == 2
    assert failed_at == [2]


CANCELLATION_ORDER = """
import asyncio, sys
from flexmarl.simulator.virtual_time import run_virtual

async def child(index, order):
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        order.append(index)
        raise

async def main():
    order = []
    ballast = []
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(40):
                ballast.append(bytearray(int(sys.argv[1]) * (index % 7)))  # other addresses in every process
                group.create_task(child(index, order))
            await asyncio.sleep(1)
            raise KeyError
    except* KeyError:
        pass
    async def done(index):
        order.append(index)
    for next_done in asyncio.as_completed([asyncio.create_task(done(index)) for index in range(40)]):
        await next_done
    return order

print(run_virtual(main()))
"""


def test_the_order_of_events_does_not_depend_on_the_process():
    def order(ballast: int) -> str:
        env = {**os.environ, "PYTHONHASHSEED": str(ballast)}
        command = [sys.executable, "-c", CANCELLATION_ORDER, str(ballast)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert order(0) == order(33) == order(170)


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=20, deadline=None)
def test_the_same_seed_gives_the_same_events_twice(seed):
    async def main() -> list[tuple[int, int, float]]:
        draw = random.Random(seed)
        events: list[tuple[int, int, float]] = []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)

        async def worker(index: int) -> None:
            for round_ in range(5):
                await asyncio.sleep(draw.choice([0, 1, 1, 2.5]))
                await queue.put(index)
                events.append((index, round_, now()))

        async def drain() -> None:
            for _ in range(40):
                events.append((-1, await queue.get(), now()))
                await asyncio.sleep(draw.random())

        async with asyncio.TaskGroup() as group:
            for index in range(8):
                group.create_task(worker(index))
            group.create_task(drain())
        return events

    assert run_virtual(main()) == run_virtual(main())


def test_a_deadlock_names_the_waiting_tasks_and_the_time():
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="train solver")
            group.create_task(asyncio.Queue().get(), name="collect")
            await asyncio.sleep(4)

    with pytest.raises(DeadlockError, match=r"at 4 s.*waiting: Task-\d+, collect, train solver"):
        run_virtual(main())


def test_sleeping_for_ever_is_a_deadlock_and_not_a_hang():
    async def main() -> None:
        await asyncio.sleep(1)
        await asyncio.sleep(math.inf)

    with pytest.raises(DeadlockError, match="at 1 s"):
        run_virtual(main())


def test_a_deadlock_still_runs_the_clean_up_of_its_tasks():
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append(now())

    with pytest.raises(DeadlockError):
        run_virtual(main())
    assert cleaned == [1]


def test_run_until_complete_reports_the_deadlock_too():
    loop = VirtualTimeLoop()
    never = loop.create_future()
    with pytest.raises(DeadlockError, match="nobody"):
        loop.run_until_complete(never)
    assert loop.run_until_complete(asyncio.sleep(2, "still usable")) == "still usable"
    loop.close()


def test_threads_are_refused():
    async def main() -> None:
        with pytest.raises(VirtualTimeError, match="threads"):
            await asyncio.to_thread(print)
        loop = asyncio.get_running_loop()
        refused = []

        def call_back() -> None:
            with pytest.raises(VirtualTimeError, match="one called back"):
                loop.call_soon_threadsafe(print)
            refused.append(True)

        thread = threading.Thread(target=call_back)
        thread.start()
        thread.join()
        assert refused

    run_virtual(main())


def test_sockets_are_refused():
    async def main() -> None:
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            with pytest.raises(VirtualTimeError, match="sockets"):
                await asyncio.get_running_loop().sock_recv(left, 1)

    run_virtual(main())


def test_a_dropped_async_generator_is_closed():
    closed = []

    async def count():
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(1)
            closed.append(now())

    async def main() -> None:
        async for _ in count():
            break
        await asyncio.sleep(5)

    run_virtual(main())
    assert closed == [1]


def test_ctrl_c_cancels_the_run():
    cancelled = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(now())
            raise

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert cancelled == [0]


def test_the_debug_mode_of_asyncio_works():
    async def main() -> float:
        asyncio.get_running_loop().set_debug(True)
        await asyncio.sleep(0.5)
        return now()

    assert run_virtual(main()) == 0.5
