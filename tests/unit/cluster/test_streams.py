"""Streams keep their items, their order and their ends over crossings that overtake each other."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.host import MOST_WAITING, Host, answer, packed
from flexmarl.cluster.streams import MOST_UNDER_WAY, Streams
from flexmarl.errors import WorkerError
from flexmarl.simulator.virtual_time import run_virtual


class Counted:
    """Streams of numbers, and what was sent."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.begun: list[int] = []
        self.heard: list[tuple[int, int]] = []
        """What was sent, and the streams that had begun to be opened by then."""

    async def count(self, key: int, to: int, gap_s: float, extra: object = None) -> AsyncIterator[int]:
        self.begun.append(key)
        self.live.add(key)
        try:
            for number in range(to):
                await asyncio.sleep(gap_s)
                yield number
        finally:
            self.live.discard(key)

    async def hear(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"{number} is negative")
        self.heard.append((number, len(self.begun)))


class Wire:
    """A channel to a host, whose crossings take different times each way."""

    def __init__(self, host: Host, seed: int, slowest_s: float) -> None:
        self._host, self._random, self._slowest_s = host, random.Random(seed), slowest_s
        self.crossings = 0
        self.under_way = self.most_under_way = 0

    async def cross(self, method: str, /, *args: Any) -> Any:
        carried = packed(*args)
        self.crossings += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self._random.uniform(0.0, self._slowest_s))
            reply = await getattr(self._host, method)(carried)
            await asyncio.sleep(self._random.uniform(0.0, self._slowest_s))
        finally:
            self.under_way -= 1
        return answer(reply)


class Ends:
    """Both ends of the streams of one resident."""

    def __init__(self, tasks: asyncio.TaskGroup, *, seed: int = 0, slowest_s: float = 0.0) -> None:
        self.hosted = Counted()
        host = Host()
        host.hosted = self.hosted
        self.wire = Wire(host, seed, slowest_s)
        self.streams = Streams(self.wire, tasks, name="counted")

    async def read(self, key: int, to: int, gap_s: float = 1.0, leave_after: int = 10**9, extra: object = None) -> Any:
        items: list[int] = []
        stream = self.streams.open("count", (key, to, gap_s, extra), {})
        try:
            async for item in stream:
                items.append(item)
                if len(items) == leave_after:
                    break
        except TypeError:
            return "refused"
        finally:
            await stream.aclose()
        return items


reads = st.tuples(
    st.floats(0.0, 5.0), st.integers(0, 6), st.floats(0.0, 2.0), st.integers(1, 8), st.sampled_from(["", "", "", "bad"])
)


@settings(deadline=None, max_examples=150)
@given(st.lists(reads, max_size=12), st.lists(st.floats(0.0, 8.0), max_size=12), st.integers(0, 2**20))
def test_crossings_that_overtake_each_other_lose_and_mix_up_nothing(
    plays: list[tuple[float, int, float, int, str]], sends: list[float], seed: int
) -> None:
    async def play(ends: Ends, key: int, play: tuple[float, int, float, int, str]) -> None:
        begin_s, to, gap_s, leave_after, bad = play
        await asyncio.sleep(begin_s)
        found = await ends.read(key, to, gap_s, leave_after, threading.Lock() if bad else None)
        assert found == ("refused" if bad else [*range(min(to, leave_after))])

    async def scenario() -> None:
        async with asyncio.timeout(300.0), asyncio.TaskGroup() as tasks:
            ends = Ends(tasks, seed=seed, slowest_s=1.0)

            async def send() -> None:
                for number, wait_s in enumerate(sorted(sends)):
                    await asyncio.sleep(wait_s)
                    ends.streams.send("hear", (number,))

            async with asyncio.TaskGroup() as all_of_them:
                all_of_them.create_task(send())
                for key, one in enumerate(plays):
                    all_of_them.create_task(play(ends, key, one))
            await ends.streams.sent()
            assert [number for number, _ in ends.hosted.heard] == [*range(len(sends))]
            await ends.streams.ended()
            assert not ends.hosted.live
            assert ends.wire.most_under_way <= MOST_UNDER_WAY + 1, "one more waits for what was sent to be taken in"
            assert not ends.wire.under_way

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_a_call_after_sent_finds_all_that_was_opened_and_sent_before(seed: int) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tasks, seed=seed, slowest_s=1.0)
            for key in range(4):
                tasks.create_task(ends.read(key, 1, gap_s=30.0))
                await asyncio.sleep(0.3)
                ends.streams.send("hear", (key,))
                await ends.streams.sent()
                assert ends.hosted.heard[-1][0] == key
                assert len(ends.hosted.begun) == key + 1

    run_virtual(scenario())


def test_a_question_and_its_answer_take_one_crossing() -> None:
    async def scenario() -> tuple[int, int]:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tasks)
            reading = tasks.create_task(ends.read(0, 50, gap_s=1.0))
            await asyncio.sleep(0.5)
            for number in range(50):
                ends.streams.send("hear", (number,))
                await asyncio.sleep(1.0)
            assert len(await reading) == 50
            return ends.wire.crossings, ends.hosted.heard[-1][0]

    crossings, last = run_virtual(scenario())
    assert last == 49
    assert crossings <= 50 + MOST_WAITING


def test_items_that_come_together_cross_together() -> None:
    async def scenario() -> int:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tasks)
            await asyncio.gather(*(ends.read(key, 5) for key in range(100)))
            return ends.wire.crossings

    assert run_virtual(scenario()) <= 6


def test_a_message_that_cannot_be_taken_ends_the_streams() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tasks)
            reading = asyncio.ensure_future(ends.read(0, 5))
            await asyncio.sleep(1.5)
            ends.streams.send("hear", (-1,))
            with pytest.raises(WorkerError, match="-1 is negative"):
                await reading
            with pytest.raises(WorkerError, match="-1 is negative"):
                ends.streams.send("hear", (1,))

    run_virtual(scenario())


def test_a_stream_whose_reading_is_ended_by_no_ordinary_exception_ends_with_an_error() -> None:
    class Gone(BaseException):
        pass

    async def breaks(key: int, to: int, gap_s: float, extra: object = None) -> AsyncIterator[int]:
        yield 0
        raise Gone

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            ends = Ends(tasks)
            ends.hosted.count = breaks
            with pytest.raises(WorkerError, match="'count' was ended by Gone"):
                await ends.read(0, 5)

    run_virtual(scenario())
