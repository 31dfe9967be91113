"""One engine serves several policies: each has a view of it, and losing it is every policy's loss, but one start."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from flexmarl.errors import EngineError
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.inference.shared_engine import EngineView, SharedEngine, SharedEngines
from flexmarl.records import FinishReason, InstanceId, PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine, utf8_text
from tests.unit.inference.models import request

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
WORDS = {SOLVER: "solved", VERIFIER: "verified"}


def scripted() -> ScriptedEngine:
    return ScriptedEngine(lambda one: WORDS[one.policy], latency_s=1.0)


class Started:
    """Starts engines, each in a second, and keeps them."""

    def __init__(self, *faults: str) -> None:
        self.engines: list[ScriptedEngine] = []
        self.names: list[InstanceId] = []
        self.faults = [*faults]

    async def spawn(self, policy: PolicyName, instance: InstanceId) -> ScriptedEngine:
        await asyncio.sleep(1)
        if self.faults:
            raise EngineError(self.faults.pop())
        self.names.append(instance)
        self.engines.append(scripted())
        return self.engines[-1]


def test_a_view_keeps_the_contract_of_an_engine() -> None:
    async def make() -> EngineView:
        shared = SharedEngine()
        shared.start(ScriptedEngine(lambda _: "x" * 64, latency_s=0.001))
        return await shared.view(SOLVER)

    asyncio.run(check_inference_engine(make, policy=SOLVER, seeded=False, stop_text=utf8_text))


def in_pool(scenario: Callable[[InferencePool, Started, SharedEngines], Awaitable[None]], *faults: str) -> None:
    """Plays the scenario on two policies that share two engines."""

    async def main() -> None:
        started = Started()
        shared = SharedEngines(started.spawn)
        views = {policy: [await shared.view(policy, InstanceId(policy, n)) for n in (0, 1)] for policy in WORDS}
        started.faults = [*faults]
        pool = InferencePool(views, PoolSettings(), respawn=shared.view)
        async with pool.open():
            for policy in WORDS:
                await pool.load_weights(policy, Version(0))
            await scenario(pool, started, shared)

    run_virtual(main())


async def ask_all(pool: InferencePool, number: int) -> list[str]:
    calls = [(policy, n) for policy in WORDS for n in range(number)]
    answers = await asyncio.gather(
        *(pool.generate(replace(request(f"{policy}-{n}", max_tokens=20), policy=policy)) for policy, n in calls)
    )
    assert all(answer.finish is FinishReason.STOP for answer in answers)
    return [utf8_text(answer.response_ids.tolist()) for answer in answers]


def test_policies_that_are_served_together_share_the_engines_that_the_first_one_starts() -> None:
    async def scenario(pool: InferencePool, started: Started, shared: SharedEngines) -> None:
        assert [str(name) for name in started.names] == ["solver/0", "solver/1"]
        assert await ask_all(pool, 4) == ["solved"] * 4 + ["verified"] * 4
        for engine in started.engines:
            assert {one.policy for one in engine.requests} == {*WORDS}, "each engine must serve both"

    in_pool(scenario)


def test_an_engine_that_is_lost_is_lost_to_all_and_started_anew_once() -> None:
    async def scenario(pool: InferencePool, started: Started, shared: SharedEngines) -> None:
        asking = asyncio.ensure_future(ask_all(pool, 4))
        await asyncio.sleep(2)
        started.engines[0].fail()
        assert await asking == ["solved"] * 4 + ["verified"] * 4
        await asyncio.sleep(5)
        assert sorted(map(str, pool.lost)) == ["solver/0", "verifier/0"]
        assert len(started.engines) == 3, "one engine must come in place of the one that both have lost"
        assert {policy: len(live) for policy, live in pool.given.items()} == {SOLVER: 2, VERIFIER: 2}

    in_pool(scenario)


def test_a_policy_that_gives_an_engine_up_costs_the_others_no_token() -> None:
    async def scenario(pool: InferencePool, started: Started, shared: SharedEngines) -> None:
        asking = asyncio.ensure_future(ask_all(pool, 4))
        await asyncio.sleep(2)
        pool.lose(InstanceId(VERIFIER, 1), "its adapter is torn")
        assert await asking == ["solved"] * 4 + ["verified"] * 4
        await asyncio.sleep(5)
        assert len(started.engines) == 3
        assert "was given up" in pool.lost[InstanceId(SOLVER, 1)]

    in_pool(scenario)


def test_a_start_that_fails_is_every_waiting_policys_and_the_next_one_serves_all() -> None:
    async def scenario(pool: InferencePool, started: Started, shared: SharedEngines) -> None:
        started.engines[0].fail()
        assert await ask_all(pool, 4) == ["solved"] * 4 + ["verified"] * 4
        await asyncio.sleep(10)
        assert len(started.engines) == 3
        assert {policy: len(live) for policy, live in pool.given.items()} == {SOLVER: 2, VERIFIER: 2}

    in_pool(scenario, "no room")


def test_a_view_loads_its_own_policys_weights_alone() -> None:
    async def check() -> None:
        shared = SharedEngine()
        shared.start(scripted())
        with pytest.raises(EngineError, match="is that of policy 'solver', not of 'verifier'"):
            await (await shared.view(SOLVER)).load_weights(VERIFIER, Version(1))

    asyncio.run(check())
