"""Residents that are objects of this process keep the laws of a cluster; places, starts, deaths are modelled."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flexmarl.cluster.inproc import InprocResident, inproc_cluster
from flexmarl.cluster.interface import Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.proxy import CLOSE_TIMEOUT_S
from flexmarl.errors import ConfigError, EngineError, WorkerError
from flexmarl.records import WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.cluster import Losses, check_cluster, make_nothing, probe, raised
from flexmarl.testing.inference import FrozenEngine
from tests.unit.hosted import engine_spec


def kill(resident: Resident[Any]) -> None:
    assert isinstance(resident, InprocResident)
    resident.die()


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_it_keeps_the_laws_of_a_cluster(latency_s: float) -> None:
    async def scenario() -> None:
        async with inproc_cluster({"node-0": 3}, start_s=2.0, crosses=True, latency_s=latency_s) as cluster:
            await check_cluster(cluster, kill)

    run_virtual(scenario())


def test_residents_go_where_the_rule_says_and_leave_room_when_they_end() -> None:
    async def scenario() -> None:
        async with inproc_cluster({"a": 2, "b": 1}, start_s=30.0) as cluster:
            residents = await cluster.spawn([probe("one"), probe("two"), probe("three")])
            assert asyncio.get_running_loop().time() == 30.0
            assert [resident.place.node for resident in residents] == ["a", "b", "a"]
            assert len({resident.place.pid for resident in residents}) == 3
            with pytest.raises(ConfigError, match=r"four needs 1 CPU .* a has 2 CPU .* 2 CPU .* taken; b has 1 CPU"):
                await cluster.spawn([probe("four")])
            await residents[1].stop()
            (again,) = await cluster.spawn([probe("four")])
            assert again.place.node == "b"
            await residents[0].stop()
            with pytest.raises(ConfigError, match=r"probe\.size"):
                await cluster.spawn([probe("five", make_nothing)])
            await cluster.spawn([probe("six")])

    run_virtual(scenario())


def test_a_node_that_is_full_is_named_though_others_have_room() -> None:
    async def scenario() -> None:
        async with inproc_cluster({"a": 1, "b": 2}) as cluster:
            (first,) = await cluster.spawn([replace(probe("one"), node="a")])
            with pytest.raises(
                ConfigError, match="two needs 1 CPU and 0 GPU on one node; a has 1 CPU and 0 GPU, of which 1 CPU"
            ):
                await cluster.spawn([replace(probe("two"), node="a")])
            pinned = [probe("two"), replace(probe("three"), node="b")]
            assert [resident.place.node for resident in await cluster.spawn(pinned)] == ["b", "b"]
            await first.stop()
            assert (await cluster.spawn([probe("four")]))[0].place.node == "a"

    run_virtual(scenario())


def test_residents_of_a_failed_spawn_are_not_kept() -> None:
    async def scenario() -> None:
        async with inproc_cluster() as cluster:
            with pytest.raises(ConfigError, match=r"probe\.size"):
                await cluster.spawn([probe("good"), probe("bad", make_nothing)])
            assert cluster.residents == []

    run_virtual(scenario())


def test_a_node_that_is_lost_while_residents_start_there_is_told_once_by_the_spawn() -> None:
    async def scenario() -> None:
        async with inproc_cluster({"a": 1, "b": 2}, start_s=30.0) as cluster:
            (first,) = await cluster.spawn([replace(probe("first"), node="b")])
            losses = Losses(cluster)
            asyncio.get_running_loop().call_later(10.0, cluster.kill_node, "b", "its node lost power")
            error = await raised(cluster.spawn([probe("one"), replace(probe("two"), node="b")]), WorkerError)
            assert str(error) == "two died: its node lost power"
            assert [(lost.process, lost.node) for lost in losses.seen] == [("first", "b")]
            assert not first.alive
            assert (await cluster.spawn([probe("one")]))[0].place.node == "a"

    run_virtual(scenario())


def test_a_kill_is_told_once_and_ends_the_live_resident_of_that_name() -> None:
    async def scenario() -> None:
        async with inproc_cluster({"a": 2}, crosses=True) as cluster:
            losses = Losses(cluster)
            (first,) = await cluster.spawn([probe("engine/solver/0")])
            cluster.kill(WorkerId("engine", "solver", 0), "its node lost power")
            (second,) = await cluster.spawn([probe("engine/solver/0")])
            cluster.kill(WorkerId("engine", "solver", 0))
            assert [(lost.pid, lost.because) for lost in losses.seen] == [
                (first.place.pid, "its node lost power"),
                (second.place.pid, "was killed"),
            ]
            with pytest.raises(WorkerError, match="engine/solver/0 died: its node lost power"):
                await first.remote.echo(1)
            with pytest.raises(KeyError):
                cluster.kill(WorkerId("engine", "solver", 0))

    run_virtual(scenario())


def test_what_is_hosted_shares_what_it_simulates() -> None:
    async def scenario() -> None:
        shared: list[int] = []
        async with inproc_cluster({"a": 1}) as cluster:
            make = partial(dict, shared=shared)
            spec = ResidentSpec(name=WorkerId("list"), kind=ResidentKind.TRAINER, contract=object, make=make)
            (resident,) = await cluster.spawn([spec])
            assert resident.remote["shared"] is shared

    run_virtual(scenario())


def test_a_resident_that_never_closes_keeps_no_other_one_from_ending() -> None:
    class Hangs(FrozenEngine):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def scenario() -> None:
        engines = [FrozenEngine(lambda request: "a"), Hangs(lambda request: "a")]
        async with inproc_cluster() as cluster:
            await cluster.spawn([engine_spec(lambda one=one: one, n) for n, one in enumerate(engines)])
        assert asyncio.get_running_loop().time() == CLOSE_TIMEOUT_S
        with pytest.raises(EngineError, match="is closed"):
            await anext(engines[0].generate([]))

    run_virtual(scenario())
