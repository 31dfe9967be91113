"""Spare boxes: each serves once, a dead one serves nobody, and none is left."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from flexmarl.assemble.boxes import sandbox_of
from flexmarl.config import load_run
from flexmarl.errors import EpisodeError
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.interface import Box, Limits
from flexmarl.sandbox.spare_boxes import IDLE_S, SparePool
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.sandbox import check_sandbox
from tests.sandbox.conftest import remains


class Counted:
    """A sandbox that counts the boxes which it opens, and remembers those that are open."""

    def __init__(self, sandbox: Any) -> None:
        self.sandbox, self.opened, self.there = sandbox, 0, list[Any]()

    @asynccontextmanager
    async def open(self, *given: Any, **named: Any) -> AsyncIterator[Box]:
        async with self.sandbox.open(*given, **named) as box:
            self.opened += 1
            self.there.append(box)
            try:
                yield box
            finally:
                self.there.remove(box)

    async def have(self, number: int) -> None:
        """Waits until so many boxes are open."""
        for _ in range(6000):
            if len(self.there) >= number:
                return
            await asyncio.sleep(0.01)


def test_a_pool_conforms_as_its_sandbox_does(sandbox):
    check_sandbox(lambda: SparePool(sandbox, 2))
    assert remains() == []


def test_an_episode_gets_a_spare_with_its_files_and_nobody_gets_it_again(sandbox):
    counted = Counted(sandbox)
    pool = SparePool(counted, 2)

    async def episode(number: int) -> str:
        async with pool.open({"mine": str(number)}) as box:
            outcome = await box.run("import os\nprint(open('mine').read(), os.listdir())\nleft = open('left', 'w')")
            return outcome.stdout.strip()

    async def run() -> list[str]:
        said = [await episode(0)]
        await counted.have(2)
        return [*said, *[await episode(number) for number in (1, 2)]]

    assert asyncio.run(run()) == [f"{number} ['mine']" for number in range(3)]
    assert counted.opened >= 3
    assert remains() == []


def test_a_spare_that_was_killed_while_it_waited_serves_nobody(sandbox):
    counted = Counted(sandbox)

    async def run() -> str:
        pool = SparePool(counted, 1)
        async with pool.open():
            await counted.have(2)
            await counted.there[1].kill()
            async with pool.open() as box:
                return (await box.run("6 * 7")).stdout

    assert asyncio.run(run()) == "42\n"
    assert remains() == []


def test_many_episodes_at_once_with_few_spares_have_boxes_of_their_own(sandbox):
    async def run() -> list[str]:
        pool = SparePool(sandbox, 3)

        async def one(number: int) -> str:
            async with pool.open() as box:
                await box.run(f"mine = {number}")
                return (await box.run("mine")).stdout.strip()

        return [*await asyncio.gather(*map(one, range(8))), *await asyncio.gather(*map(one, range(8)))]

    assert asyncio.run(run()) == [str(number) for number in range(8)] * 2
    assert remains() == []


def test_a_box_with_limits_of_its_own_is_no_spare(sandbox):
    async def run() -> int:
        counted = Counted(sandbox)
        async with SparePool(counted, 2).open(limits=Limits(pids=16)):
            return counted.opened

    assert asyncio.run(run()) == 1


def test_a_cancelled_call_ends_its_spare(sandbox):
    async def run() -> None:
        counted = Counted(sandbox)
        pool = SparePool(counted, 1)
        async with pool.open():
            await counted.have(2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0), pool.open() as box:
                    await box.run("while True: pass", timeout_s=600)

    asyncio.run(run())
    assert remains() == []


class Modelled:
    """A sandbox whose boxes take a second to open and nothing else, in virtual time."""

    def __init__(self, *, broken: bool = False) -> None:
        self.open_now, self.opened, self.broken = 0, 0, broken

    @asynccontextmanager
    async def open(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        if self.broken:
            raise EpisodeError("the sandbox cannot start a box")
        await asyncio.sleep(1.0)
        self.opened += 1
        self.open_now += 1
        try:
            yield self
        finally:
            self.open_now -= 1

    lost = False

    async def run(self, code: str, *, timeout_s: float) -> "Modelled":
        return self


@pytest.mark.without_bwrap
def test_spares_that_nobody_takes_end():
    modelled = Modelled()

    async def run() -> list[int]:
        pool = SparePool(modelled, 3)
        async with pool.open():
            await asyncio.sleep(10.0)
            busy = modelled.open_now
        await asyncio.sleep(IDLE_S)
        idle = modelled.open_now
        began = asyncio.get_running_loop().time()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(pool.open())
            await asyncio.sleep(10.0)
            waited = asyncio.get_running_loop().time()
            await stack.enter_async_context(pool.open())
            assert (waited - began, asyncio.get_running_loop().time()) == (11.0, waited), "a spare needs no time"
        return [busy, idle]

    assert run_virtual(run()) == [4, 0]


@pytest.mark.without_bwrap
def test_a_sandbox_that_opens_no_box_fails_who_asks_for_one():
    async def run() -> None:
        pool = SparePool(Modelled(broken=True), 2)
        for _ in range(2):
            with pytest.raises(EpisodeError, match="cannot start a box"):
                async with pool.open():
                    pass

    run_virtual(run())


@pytest.mark.without_bwrap
def test_a_run_has_the_spares_of_its_settings_and_they_can_be_sent(small_run):
    tool = "team.agents.solver.tools=[{type: python}]"
    pool = sandbox_of(load_run(small_run, [tool, "sandbox.spare=3"]))
    assert isinstance(pool, SparePool)
    again = pickle.loads(pickle.dumps(pool))
    assert (again.spare, again.sandbox) == (3, pool.sandbox)
    assert isinstance(sandbox_of(load_run(small_run, [tool])), Bubblewrap)
