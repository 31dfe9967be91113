"""Wrappers that break what they stand around."""

import asyncio
from random import Random
from typing import Any

import pytest
import torch

from flexmarl.errors import EngineError
from flexmarl.events.journal import RememberedEvents
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import FinishReason, Generation, InstanceId, PolicyName, Version
from flexmarl.simulator.virtual_time import DeadlockError, run_virtual
from flexmarl.testing.faults.fault_plan import Fault, FaultKind, FaultPlan
from flexmarl.testing.faults.faulty import FaultyEngine, SlowStore
from flexmarl.testing.faults.injection import Injection
from flexmarl.testing.faults.watched import WatchedEngine
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine
from tests.unit.inference.models import POLICY, request

SOLVER = PolicyName("solver")


def faulty(*faults: Fault, objects: InlineObjectStore | None = None) -> FaultyEngine:
    engine = ScriptedEngine(lambda one: "abcdefghijklmnop" * 4, latency_s=1.0, objects=objects)
    injection = Injection(FaultPlan(faults=faults))
    injection.begin(RememberedEvents(lambda: 0.0), lambda: None)
    return FaultyEngine(InstanceId("solver", 0), engine, injection)


async def ask(engine, *requests) -> dict[str, Generation]:
    return {answer.request_id: answer async for answer in engine.generate(requests)}


def test_an_engine_that_nothing_befalls_conforms_through_both_wrappers() -> None:
    objects = InlineObjectStore()

    async def make() -> Any:
        return WatchedEngine(faulty(objects=objects))

    async def publish(version):
        return (await objects.set(weights_key(POLICY, version), {"weight": torch.ones(1)})).checksum

    run_virtual(check_inference_engine(make, policy=POLICY, publish=publish))


def test_a_mute_engine_answers_to_no_call_not_even_to_be_closed() -> None:
    async def scenario(then) -> None:
        engine = faulty()
        asking = asyncio.create_task(ask(engine, request("a", max_tokens=9)), name="ask")
        await asyncio.sleep(1.5)
        engine.mute()
        done, _ = await asyncio.wait([asking], timeout=1000.0)
        assert not done
        await then(engine)

    for then in (
        lambda engine: engine.close(),
        lambda engine: engine.usage(),
        lambda engine: engine.abort(["a"]),
        lambda engine: engine.load_weights(SOLVER, Version(1)),
        lambda engine: ask(engine, request("b")),
    ):
        with pytest.raises(DeadlockError):
            run_virtual(scenario(then))


def test_an_engine_may_refuse_to_load_and_keeps_what_it_has() -> None:
    async def scenario() -> None:
        objects = InlineObjectStore()
        meta = await objects.set(weights_key(SOLVER, Version(1)), {"weight": torch.ones(1)})
        refusal = Fault(kind=FaultKind.FAILED_PUBLISH, target=InstanceId("solver", 0), after=1, how="refused")
        other = Fault(kind=FaultKind.FAILED_PUBLISH, target=InstanceId("solver", 0), after=2, how="other_bytes")
        engine = faulty(refusal, other, objects=objects)
        with pytest.raises(EngineError, match="solver/0 refused to load version 1, as planned"):
            await engine.load_weights(SOLVER, Version(1))
        assert engine.version == 0
        assert await engine.load_weights(SOLVER, Version(1)) == "other bytes"
        assert await engine.load_weights(SOLVER, Version(1)) == meta.checksum

    run_virtual(scenario())


def test_requests_that_are_to_fail_end_with_what_was_sampled_of_them() -> None:
    async def scenario() -> None:
        engine = faulty(Fault(kind=FaultKind.ENGINE_ERRORS, target="solver", after=2, amount=2.0))
        answers = await ask(engine, *(request(str(number), max_tokens=3) for number in range(1, 5)))
        assert [answers[str(number)].finish for number in range(1, 5)] == [
            FinishReason.LENGTH,
            FinishReason.ERROR,
            FinishReason.ERROR,
            FinishReason.LENGTH,
        ]
        assert len(answers["2"].response_ids) == 3

    run_virtual(scenario())


def test_calls_of_a_slow_store_overtake_one_another() -> None:
    class Store:
        async def counts(self, number: int) -> int:
            done.append(number)
            return number

    async def scenario() -> None:
        store = SlowStore(Store(), longest_s=1.0, random=Random(1))  # type: ignore[arg-type]
        assert await asyncio.gather(*(store.counts(number) for number in range(8))) == list(range(8))

    done: list[int] = []
    run_virtual(scenario())
    assert sorted(done) == list(range(8)) != done
