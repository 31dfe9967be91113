"""Workers that are objects of this process keep the laws of a cluster; places, starts, deaths are modelled."""

import asyncio
from functools import partial

import pytest

from flexmarl.cluster.interface import Worker, WorkerRole, WorkerSpec
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.simulator.cluster import SimulatedCluster, SimulatedWorker
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.cluster import Losses, check_cluster, make_nothing, probe


def kill(worker: Worker) -> None:
    assert isinstance(worker, SimulatedWorker)
    worker.die()


def test_it_keeps_the_laws_of_a_cluster() -> None:
    async def scenario() -> None:
        await check_cluster(SimulatedCluster({"node-0": 3}, start_s=2.0), kill)

    run_virtual(scenario())


def test_workers_go_where_most_room_is_and_leave_it_when_they_end() -> None:
    async def scenario() -> None:
        async with SimulatedCluster({"a": 2, "b": 1}, start_s=30.0) as cluster:
            workers = await cluster.spawn([probe("one"), probe("two"), probe("three")])
            assert asyncio.get_running_loop().time() == 30.0
            assert [worker.place.node for worker in workers] == ["a", "a", "b"]
            assert len({worker.place.pid for worker in workers}) == 3
            with pytest.raises(ConfigError, match="room for 0 more workers, got 1; give it more nodes"):
                await cluster.spawn([probe("four")])
            await workers[2].stop()
            (again,) = await cluster.spawn([probe("four")])
            assert again.place.node == "b"
            await workers[0].stop()
            with pytest.raises(ConfigError, match=r"probe\.size"):
                await cluster.spawn([probe("five", make_nothing)])
            await cluster.spawn([probe("six")])

    run_virtual(scenario())


def test_a_kill_is_told_once_and_ends_the_live_worker_of_that_name() -> None:
    async def scenario() -> None:
        async with SimulatedCluster({"a": 2}) as cluster:
            cluster.on_lost = losses = Losses()
            (first,) = await cluster.spawn([probe("engine/solver/0")])
            cluster.kill("engine/solver/0", "its node lost power")
            (second,) = await cluster.spawn([probe("engine/solver/0")])
            cluster.kill("engine/solver/0")
            assert [(lost.pid, lost.because) for lost in losses.told] == [
                (first.place.pid, "its node lost power"),
                (second.place.pid, "was killed"),
            ]
            with pytest.raises(WorkerError, match="engine/solver/0 died: its node lost power"):
                await first.call("echo", 1)
            with pytest.raises(KeyError):
                cluster.kill("engine/solver/0")

    run_virtual(scenario())


def test_what_is_hosted_shares_what_it_simulates() -> None:
    async def scenario() -> None:
        shared: list[int] = []
        async with SimulatedCluster({"a": 1}) as cluster:
            spec = WorkerSpec(name="list", role=WorkerRole.TRAINER, make=partial(dict, shared=shared))
            await cluster.spawn([spec])
            assert cluster.workers[0].hosted["shared"] is shared

    run_virtual(scenario())
