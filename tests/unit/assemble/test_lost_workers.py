"""What the death of a process means for the run."""

import asyncio
from types import SimpleNamespace

import pytest

from flexmarl.assemble.ending import run_until_lost
from flexmarl.assemble.world import Processes, watch_workers
from flexmarl.cluster.interface import ResidentPlace
from flexmarl.errors import TrainingError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import WorkerLost
from flexmarl.records import WorkerId
from flexmarl.simulator.virtual_time import run_virtual


def death_of(name: str) -> WorkerLost:
    return WorkerLost(process=WorkerId.parse(name), node="here", pid=7, because="its process was killed")


class Watched:
    """A world of which only its processes and its pool's losses are looked at. Made inside the event loop."""

    def __init__(self, **together: object) -> None:
        self.events, self.losses = RememberedEvents(), []
        self.processes = Processes(
            {name: ResidentPlace(node="here", pid=7) for name in ("engine/one/0", "trainer/one")}
        )
        pool = SimpleNamespace(lose=lambda instance, because: self.losses.append((instance, because)))
        self.failed = watch_workers(
            SimpleNamespace(pool=pool, processes=self.processes, together=together), self.events
        )


def test_a_dead_trainer_ends_a_run_that_waits_for_something_else():
    async def life():
        watched = Watched()
        asyncio.get_running_loop().call_later(5.0, watched.events.emit, death_of("trainer/one"))
        waits = asyncio.Event()
        with pytest.raises(TrainingError, match=r"policy 'one'.*pid 7 on here.*was killed.*--resume"):
            await run_until_lost(waits.wait(), watch=asyncio.sleep(3600), lost=[watched.failed], events=watched.events)
        assert asyncio.get_running_loop().time() == 5.0
        assert [event.process for event in watched.events.of(WorkerLost)] == ["trainer/one"]

    run_virtual(life())


def test_a_dead_trainer_of_several_policies_is_that_of_all_of_them():
    async def life():
        watched = Watched(one=SimpleNamespace(trainers=["one", "two"]))
        watched.events.emit(death_of("trainer/one"))
        with pytest.raises(TrainingError, match=r"policy 'one', 'two': the trainer's process \(pid 7 on here\) died"):
            await watched.failed

    run_virtual(life())


def test_a_dead_engine_is_the_pools_to_replace_and_the_run_goes_on():
    async def life():
        watched = Watched()
        watched.events.emit(death_of("engine/one/0"))
        assert watched.losses == [("one/0", "its process was killed")]
        assert list(watched.processes.places) == ["trainer/one"]
        await run_until_lost(asyncio.sleep(1), watch=asyncio.sleep(3600), lost=[watched.failed], events=watched.events)
        assert not watched.failed.done()

    run_virtual(life())
