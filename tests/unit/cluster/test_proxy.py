"""What goes wrong in one call or one stream of a resident stays there: others go on, and nothing is taken for known."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, Protocol

import pytest

from flexmarl.cluster.host import Host, answer, packed
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.proxy import alters, restores
from flexmarl.errors import EngineError, WorkerError
from flexmarl.records import WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.cluster import probe


class Counting(Protocol):
    async def get(self) -> int: ...

    async def cancels(self) -> int: ...

    async def fails(self) -> None: ...

    @alters
    async def add(self, amount: int) -> int: ...

    @restores
    async def load(self, saved: int | None) -> None: ...

    def items(self, kind: Any) -> AsyncIterator[Any]: ...


class Counter:
    """A number that takes a second to change, and streams of three items of which the last may be a bad one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self.number = 0

    async def get(self) -> int:
        return self.number

    async def cancels(self) -> int:
        raise asyncio.CancelledError

    async def fails(self) -> None:
        class OutOfPages(EngineError):
            pass

        raise OutOfPages("no page is free")

    async def add(self, amount: int) -> int:
        async with self._turn:
            await asyncio.sleep(1.0)
            self.number += amount
            return self.number

    async def load(self, saved: int | None) -> None:
        async with self._turn:
            if saved is None:
                raise FileNotFoundError("no such checkpoint")
            self.number = saved

    async def items(self, kind: Any) -> AsyncIterator[Any]:
        for number in (0, 1):
            await asyncio.sleep(1.0)
            yield number
        if kind == "cancels":
            raise asyncio.CancelledError
        yield threading.Lock() if kind == "lock" else 2


async def counter_in(cluster: Any) -> Resident[Counting]:
    spec = ResidentSpec(name=WorkerId("counter"), kind=ResidentKind.ENGINE, contract=Counting, make=Counter)
    (resident,) = await cluster.spawn([spec])
    return resident


async def read(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
    """The result, or the name of the error's class."""
    try:
        return await call
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("bad", ["lock", threading.Lock()], ids=["an item", "an argument"])
def test_a_stream_that_cannot_be_copied_fails_alone(bad: Any) -> None:
    async def scenario() -> None:
        async with inproc_cluster(crosses=True) as cluster:
            remote = (await counter_in(cluster)).remote
            outcomes = await asyncio.gather(*(outcome(read(remote.items(kind))) for kind in ("good", bad, "good")))
            assert outcomes == [[0, 1, 2], "TypeError", [0, 1, 2]]
            assert await read(remote.items("good")) == [0, 1, 2]

    run_virtual(scenario())


def test_work_that_is_cancelled_by_itself_is_an_error_of_its_caller_and_no_cancellation() -> None:
    async def scenario() -> None:
        async with inproc_cluster(crosses=True) as cluster, asyncio.timeout(60.0):
            remote = (await counter_in(cluster)).remote
            with pytest.raises(RuntimeError, match="cancelled"):
                await remote.cancels()
            with pytest.raises(RuntimeError, match="cancelled"):
                await read(remote.items("cancels"))

    run_virtual(scenario())


def test_an_error_of_a_class_that_cannot_be_copied_keeps_the_nearest_class_that_can() -> None:
    async def scenario() -> None:
        async with inproc_cluster(crosses=True) as cluster:
            with pytest.raises(EngineError, match="OutOfPages: no page is free"):
                await (await counter_in(cluster)).remote.fails()

    run_virtual(scenario())


async def cancelled(call: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task])


def test_a_restoring_call_that_fails_leaves_the_state_unknown() -> None:
    async def scenario() -> None:
        async with inproc_cluster(crosses=True) as cluster:
            remote = (await counter_in(cluster)).remote
            await cancelled(remote.add(1))
            with pytest.raises(FileNotFoundError):
                await remote.load(None)
            with pytest.raises(WorkerError, match="'add' was cancelled"):
                await remote.add(10)
            await remote.load(100)
            assert await remote.add(10) == 110

    run_virtual(scenario())


def test_a_restoring_call_says_nothing_of_a_change_that_was_asked_for_after_it() -> None:
    async def scenario() -> None:
        async with inproc_cluster(crosses=True) as cluster:
            remote = (await counter_in(cluster)).remote
            first = asyncio.ensure_future(remote.add(1))
            await asyncio.sleep(0.1)
            load = asyncio.ensure_future(remote.load(100))
            await cancelled(remote.add(10))
            await asyncio.wait([first, load])
            with pytest.raises(WorkerError, match="'add' was cancelled"):
                await remote.get()

    run_virtual(scenario())


def test_a_resident_whose_node_is_lost_while_it_starts_is_not_returned_as_a_live_one() -> None:
    async def scenario() -> None:
        async with inproc_cluster({"a": 1, "b": 1}, start_s=5.0, crosses=True) as cluster:
            asyncio.get_running_loop().call_later(2.0, partial(cluster.kill_node, "a"))
            with pytest.raises(WorkerError, match="one died: its node was lost"):
                await cluster.spawn([probe("one")])

    run_virtual(scenario())


def test_a_call_that_comes_before_the_object_is_made_is_told_so_and_may_be_repeated():
    """A resident that is started anew has its name before its object."""

    async def scenario():
        host = Host()
        with pytest.raises(WorkerError, match="it is being started"):
            answer(await host.call_method("index", packed("b")))
        answer(await host.make_hosted(packed(list, "abc")))
        assert answer(await host.call_method("index", packed("b"))) == 1

    asyncio.run(scenario())
