"""Engines that grow, retire and move on the nodes of a cluster in virtual time: room is never given twice."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.assemble.engine_room import RunEngines, room_of_a_private_ray
from flexmarl.assemble.world import Processes
from flexmarl.cluster.inproc import InprocCluster, inproc_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.errors import EngineError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import ProcessEnded, ProcessStarted, WorkerLost
from flexmarl.events.serving_events import (
    GrowthFailed,
    InstanceGrown,
    InstanceLost,
    InstanceReplaced,
    InstanceRetired,
    Moved,
)
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.scaling import RULES
from flexmarl.inference.settings import BalanceSettings, PoolSettings
from flexmarl.orchestrator.balance import Balancer
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import utf8_text
from flexmarl.testing.scripted_run import ScriptedRun
from tests.unit.inference.moving import JUDGE, LETTERS, SOLVER, Movable, ask, publish

START_S = 10.0


@dataclass
class Scripted:
    """Residents that say their policy's letters. `threads` makes processes unlike."""

    threads: Mapping[str, int]

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[InferenceEngine]:
        return ResidentSpec(
            name=WorkerId.engine(instance),
            kind=ResidentKind.ENGINE,
            contract=WeightedEngine,
            make=partial(Movable, policy),
            error=EngineError,
            threads=self.threads.get(policy, 1),
        )

    def replacement_s(self, policy: PolicyName) -> float:
        return 0.0


Scenario = Callable[[Any], Awaitable[None]]


def play(
    scenario: Scenario,
    nodes: Mapping[str, int],
    *,
    solvers: int = 1,
    judges: int = 1,
    threads: Mapping[str, int] = {},
    **balance: Any,
) -> None:
    """Runs the scenario on nodes with so much room each, beside a balancer that looks every five seconds."""

    async def main() -> None:
        events = RememberedEvents(asyncio.get_running_loop().time)
        settings = ScriptedRun(agents={"solver": SOLVER, "judge": JUDGE}).settings
        settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"backend": "ray"})})
        async with inproc_cluster(nodes, start_s=START_S, crosses=True, events=events) as cluster:
            residents: Any = Scripted(threads)
            engines = RunEngines(settings, cluster, residents, processes := Processes())
            given: dict[PolicyName, list[Any]] = {SOLVER: [], JUDGE: []}
            names = [*(InstanceId(SOLVER, n) for n in range(solvers)), *(InstanceId(JUDGE, n) for n in range(judges))]
            for resident in await cluster.spawn([residents.engine(name.policy, name) for name in names]):
                engines.add(resident)
                processes.add(resident)
                given[PolicyName(resident.name.policy)].append(resident.remote)
            pool_settings = PoolSettings(max_running=1, close_timeout_s=1.0)
            pool = InferencePool(given, pool_settings, respawn=engines.start, room=engines, events=events)
            events.listen(WorkerLost, lambda lost: processes.places.pop(lost.process, None))
            events.listen(WorkerLost, lambda lost: pool.lose(lost.process.instance, lost.because))
            async with pool.open():
                await publish(pool)
                asked = BalanceSettings(**{"rule": "queue_gap", "gap": 99, "grow": True, "start_s": 12.0, **balance})
                balancer = Balancer(pool, RULES[asked.rule](asked), asked, events, slots={SOLVER: 1, JUDGE: 1})
                watching = asyncio.create_task(balancer.watch(), name="watch")
                full = asyncio.create_task(never_too_many(cluster), name="full")
                await scenario(SimpleNamespace(pool=pool, cluster=cluster, events=events, processes=processes))
                assert not full.done(), full.result()
                full.cancel()
                watching.cancel()

    run_virtual(main())


async def never_too_many(cluster: InprocCluster) -> str:
    """Returns when a node holds more residents than it has room for."""
    while True:
        for node in cluster.nodes:
            there = [one for one in cluster.residents if one.alive and one.place.node == node.name]
            if len(there) > node.cpus:
                return f"{node} has {[one.name for one in there]}"
        await asyncio.sleep(0.5)


def whole(answers: list[Any], policy: PolicyName) -> bool:
    return [utf8_text(answer.response_ids.tolist()) for answer in answers] == [LETTERS[policy]] * len(answers)


def test_the_policy_that_drains_last_grows_into_the_free_room_of_the_nodes() -> None:
    async def scenario(at: Any) -> None:
        answers = await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(40)), ask(at.pool, "s"))
        assert whole(answers[:-1], JUDGE)
        assert whole(answers[-1:], SOLVER)
        grown = at.events.of(InstanceGrown)
        assert [event.instance for event in grown] == ["judge/1", "judge/2", "judge/3", "judge/4"], "4 of 6 were free"
        assert all(event.because.startswith("'judge' drains last, in ") for event in grown)
        assert [event.expected_s for event in grown] == [12.0, 12.0, 12.0, 10.0], "as measured, once one has been"
        assert [event.seconds for event in grown] == [START_S] * 4
        started = {event.process: event.node for event in at.events.of(ProcessStarted)}
        assert sorted(started.values()) == ["a", "a", "b", "b"]
        assert {*started} <= {*at.processes.places}
        assert not at.events.of(GrowthFailed, InstanceLost)

    play(scenario, {"a": 3, "b": 3})


def test_nothing_grows_without_room_or_where_it_is_not_asked_to() -> None:
    async def scenario(at: Any) -> None:
        assert whole(await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(40))), JUDGE)
        assert not at.events.of(InstanceGrown, GrowthFailed)

    play(scenario, {"a": 1, "b": 1})
    play(scenario, {"a": 3, "b": 3}, grow=False)


def test_the_last_requests_of_a_step_start_nothing() -> None:
    async def scenario(at: Any) -> None:
        await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(2)))
        assert not at.events.of(InstanceGrown), "in 20 s all are answered: a start of 12 s saves less than it lasts"

    play(scenario, {"a": 3, "b": 3}, start_s=20.0)


def test_a_lost_node_takes_further_instances_first() -> None:
    async def scenario(at: Any) -> None:
        calls = [ask(at.pool, i, JUDGE) for i in range(60)]
        grown = asyncio.Semaphore(0)
        at.events.listen(InstanceGrown, lambda event: grown.release())
        for _ in range(2):
            await grown.acquire()
        assert len([one for one in at.cluster.residents if one.alive]) == 4, "witness: both nodes are full"
        (solver,) = (one for one in at.cluster.residents if one.name == "engine/solver/0")
        at.cluster.kill_node(solver.place.node)
        assert whole([await ask(at.pool, "s")], SOLVER)
        assert whole(await asyncio.gather(*calls), JUDGE)
        kinds = [type(event) for event in at.events.of(InstanceReplaced, InstanceRetired, Moved)]
        assert InstanceRetired in kinds or Moved in kinds, "witness: somebody gave its room"
        assert {name.policy for name in await at.pool.usage()} == {SOLVER, JUDGE}

    play(scenario, {"a": 2, "b": 2}, poll_s=1.0)


def test_a_move_between_unlike_processes_ends_one_and_starts_another_on_full_nodes() -> None:
    async def scenario(at: Any) -> None:
        before = {*at.processes.places}
        answers = await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(60)))
        assert whole(answers, JUDGE)
        moves = at.events.of(Moved)
        assert [(move.instance, move.became, move.starts) for move in moves[:1]] == [("solver/0", "judge/1", True)]
        assert moves[0].expected_s == 12.0
        assert moves[0].seconds == START_S
        (ended,) = at.events.of(ProcessEnded)
        assert ended.process == "engine/solver/0"
        assert {*at.processes.places} == before - {"engine/solver/0"} | {"engine/judge/1"}
        assert not at.events.of(InstanceGrown, InstanceLost, WorkerLost)

    play(scenario, {"a": 2, "b": 1}, solvers=2, threads={JUDGE: 2}, rule="drain_time")


def test_an_instance_of_a_process_like_the_others_keeps_it() -> None:
    async def scenario(at: Any) -> None:
        assert whole(await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(60))), JUDGE)
        assert [move.starts for move in at.events.of(Moved)] == [False]
        assert not at.events.of(ProcessStarted, ProcessEnded)

    play(scenario, {"a": 2, "b": 1}, solvers=2, rule="drain_time")


@pytest.mark.parametrize(("grow", "cores", "room"), [(False, 16, 3), (True, 16, 9), (True, 4, 3), (True, 1, 3)])
def test_a_private_ray_has_room_for_cores_that_no_thread_has(grow: bool, cores: int, room: int) -> None:
    """Three residents with 2, 1 and 1 threads; a further one takes two."""
    spec: Any = Scripted({JUDGE: 2}).engine(JUDGE, InstanceId(JUDGE, 0))
    specs = [spec, replace(spec, threads=1), replace(spec, threads=1), replace(spec, in_controller=True)]
    settings = SimpleNamespace(balance=SimpleNamespace(grow=grow), cluster=SimpleNamespace(device="cpu"))
    assert room_of_a_private_ray(settings, specs, cores=cores) == room  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engines", "ranks", "alone", "rooms"), [(2, 2, 0, 2), (3, 1, 1, 4), (1, 4, 2, 6), (0, 2, 0, 2)]
)
def test_a_private_ray_has_one_room_for_an_engine_and_a_rank_in_turn(
    engines: int, ranks: int, alone: int, rooms: int
) -> None:
    spec: Any = Scripted({JUDGE: 1}).engine(JUDGE, InstanceId(JUDGE, 0))
    specs = [replace(spec, takes_turns=True)] * engines + [spec] * alone
    specs += [replace(spec, kind=ResidentKind.RANK, name=WorkerId.rank(n, 0), takes_turns=True) for n in range(ranks)]
    settings = SimpleNamespace(balance=SimpleNamespace(grow=False), cluster=SimpleNamespace(device="cpu"))
    assert room_of_a_private_ray(settings, specs, cores=16) == rooms  # type: ignore[arg-type]
