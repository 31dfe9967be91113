"""An engine in another process, seen through a worker: real engines, and scripted ones in virtual time."""

import asyncio
from functools import partial

import pytest

from flexmarl.errors import EngineError
from flexmarl.inference.backends.host import EngineHost, host_engine
from flexmarl.inference.backends.remote import RemoteEngine
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine, utf8_text
from tests.unit.inference import models as tiny
from tests.unit.inference.models import POLICY, request
from tests.unit.workers import LocalWorker

STORE = InlineObjectStore()


def the_store():
    return STORE


def decode_letters():
    return tiny.letters


def embedded_worker(**changes):
    return LocalWorker(
        partial(
            host_engine,
            tiny.settings(**changes),
            policy=POLICY,
            make_model=tiny.qwen3,
            make_decode=decode_letters,
            make_store=the_store,
        )
    )


def say(one):
    return "abcdefghijklmnop" * 4


def scripted_host(latency_s):
    return EngineHost(ScriptedEngine(say, latency_s=latency_s))


def scripted_worker(token_s=1.0, **more):
    return LocalWorker(partial(scripted_host, token_s), **more)


async def collect(engine, requests):
    return {generation.request_id: generation async for generation in engine.generate(requests)}


def controllers_tasks(worker):
    """Those of the RemoteEngine; the engine's own end with its process."""
    return [task.get_name() for task in asyncio.all_tasks() if worker.name in task.get_name()]


def test_an_embedded_engine_conforms_through_its_worker():
    async def make():
        return RemoteEngine(embedded_worker(), POLICY)

    versions = iter(range(1, 100))

    async def publish():
        meta = await STORE.set(ObjectKey(f"weights/{next(versions)}"), tiny.qwen3(1).state_dict())
        return meta.key, meta.checksum

    async def check():
        async with asyncio.timeout(60):
            await check_inference_engine(make, policy=POLICY, stop_text=tiny.letters, publish=publish)

    asyncio.run(check())


@pytest.mark.parametrize(("token_s", "latency_s"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.2)])
def test_a_scripted_engine_conforms_through_its_worker(token_s, latency_s):
    async def make():
        return RemoteEngine(scripted_worker(token_s, latency_s=latency_s), POLICY)

    async def publish():
        return ObjectKey("weights/7"), Checksum("sum:weights/7")

    run_virtual(check_inference_engine(make, policy=POLICY, stop_text=utf8_text, publish=publish))


def test_a_worker_that_dies_fails_every_call_with_the_reason_and_every_later_one():
    async def scenario():
        worker = scripted_worker()
        engine = RemoteEngine(worker, POLICY)
        readers = [asyncio.create_task(collect(engine, [request(name, max_tokens=50)])) for name in "abc"]
        await asyncio.sleep(3.5)
        assert (await engine.usage()).queued + (await engine.usage()).running == 3
        worker.die()
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "engine of 'solver' is lost: engine/solver/0 died in collect" in str(outcome)
        with pytest.raises(EngineError, match="died in collect"):
            await collect(engine, [request("later")])
        with pytest.raises(EngineError, match="died in collect"):
            await engine.load_weights(POLICY, Version(1), ObjectKey("k"))
        await engine.close()
        assert not controllers_tasks(worker)

    run_virtual(scenario())


def test_requests_of_one_tick_cross_together_and_one_collect_waits_for_all_of_them():
    async def scenario():
        worker = scripted_worker(0.1, latency_s=0.01)
        engine = RemoteEngine(worker, POLICY)
        readers = [asyncio.create_task(collect(engine, [request(i, max_tokens=5)])) for i in range(20)]
        await asyncio.gather(*readers)
        assert worker.calls == ["submit", "collect"]
        assert worker.largest == 1

    run_virtual(scenario())
