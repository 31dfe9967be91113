"""An engine in another process, seen through a worker: real engines, and scripted ones in virtual time."""

import asyncio
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.backends.host import EngineHost, host_engine
from flexmarl.inference.backends.remote import CLOSE_TIMEOUT_S, RemoteEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import FinishReason, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine, utf8_text
from flexmarl.training.backends.causal_lm import load_model
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


def test_usage_is_known_here_and_crosses_nothing():
    async def scenario():
        worker = scripted_worker(1.0)
        engine = RemoteEngine(worker, POLICY)
        reader = asyncio.create_task(collect(engine, [request(name, max_tokens=n) for name, n in (("a", 2), ("b", 9))]))
        await asyncio.sleep(0.5)
        use = await engine.usage()
        assert (use.queued + use.running, use.queued_tokens) == (2, 11)
        await asyncio.sleep(2)
        use = await engine.usage()
        assert (use.queued, use.running, use.queued_tokens) == (0, 1, 9)
        crossings = list(worker.calls)
        for _ in range(100):
            await engine.usage()
        assert worker.calls == crossings == ["submit", "collect", "collect"]
        await reader

    run_virtual(scenario())


def test_answers_that_are_there_together_cross_together():
    async def scenario():
        worker = scripted_worker(1.0, latency_s=0.1)
        engine = RemoteEngine(worker, POLICY)
        lengths = (2, 2, 2, 5, 5)
        got = await asyncio.gather(
            *(collect(engine, [request(i, max_tokens=length)]) for i, length in enumerate(lengths))
        )
        assert [len(answers[str(i)].response_ids) for i, answers in enumerate(got)] == list(lengths)
        assert worker.calls == ["submit", "collect", "collect"]

    run_virtual(scenario())


def test_leaving_the_iterator_early_aborts_the_rest_and_leaves_nothing_on_either_side():
    async def scenario():
        worker = scripted_worker(1.0, latency_s=0.1)
        engine = RemoteEngine(worker, POLICY)
        answers = engine.generate([request("short", max_tokens=1), request("long", max_tokens=60)])
        assert (await anext(answers)).request_id == "short"
        await answers.aclose()
        (refused,) = (await collect(engine, [request("long", max_tokens=2)])).values()
        assert (refused.finish, "is in use" in refused.error) == (FinishReason.ERROR, True)
        await asyncio.sleep(3)
        assert len((await collect(engine, [request("long", max_tokens=2)]))["long"].response_ids) == 2
        assert (await engine.usage()).queued_tokens == 0
        assert (await worker.hosted._engine.usage()).running == 0
        assert not worker.hosted._done
        assert not controllers_tasks(worker)

    run_virtual(scenario())


def test_a_repeated_id_is_refused_alone_and_its_first_bearer_served():
    async def scenario():
        engine = RemoteEngine(scripted_worker(1.0), POLICY)
        got = [one async for one in engine.generate([request("a", max_tokens=3), request("a"), request("b")])]
        assert [(one.request_id, one.finish) for one in got] == [
            ("a", FinishReason.ERROR),
            ("a", FinishReason.LENGTH),
            ("b", FinishReason.LENGTH),
        ]
        answers = engine.generate([request("c", max_tokens=60), request("c")])
        assert (await anext(answers)).finish is FinishReason.ERROR
        await answers.aclose()
        await asyncio.sleep(2)
        assert (await engine.usage()).queued_tokens == 0, "the one that was served must have been aborted"

    run_virtual(scenario())


def test_an_engine_that_fails_in_its_process_fails_here_with_its_reason():
    async def scenario():
        worker = scripted_worker(1.0)
        engine = RemoteEngine(worker, POLICY)
        readers = [asyncio.create_task(collect(engine, [request(name, max_tokens=9)])) for name in "ab"]
        await asyncio.sleep(2.5)
        worker.hosted._engine.fail("out of memory")
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert str(outcome) == "the engine of 'solver' is lost: out of memory"

    run_virtual(scenario())


class Forgetful(ScriptedEngine):
    async def generate(self, requests):
        async for generation in super().generate(requests[:-1]):
            yield generation


def forgetful_host():
    return EngineHost(Forgetful(say))


def test_an_engine_that_leaves_a_request_without_an_answer_is_lost_rather_than_waited_for():
    async def scenario():
        engine = RemoteEngine(LocalWorker(forgetful_host), POLICY)
        with pytest.raises(EngineError, match="left 1 of 2 requests without an answer"):
            await collect(engine, [request("a", max_tokens=1), request("b", max_tokens=1)])

    run_virtual(scenario())


def test_a_load_that_fails_keeps_the_engine_and_its_version():
    def refuse(key):
        raise EngineError(f"no weight 'x' in {key}")

    async def scenario():
        worker = scripted_worker(1.0)
        engine = RemoteEngine(worker, POLICY)
        worker.hosted._engine._checksum = refuse
        with pytest.raises(EngineError, match="no weight 'x' in k"):
            await engine.load_weights(POLICY, Version(1), ObjectKey("k"))
        assert (await engine.usage()).version == 0
        assert len(await collect(engine, [request("a", max_tokens=2)])) == 1

    run_virtual(scenario())


def test_closing_does_not_wait_for_ever_for_a_worker_that_hangs():
    async def scenario():
        worker = scripted_worker(1.0)
        engine = RemoteEngine(worker, POLICY)
        reader = asyncio.create_task(collect(engine, [request("a", max_tokens=60)]))
        await asyncio.sleep(1.5)
        worker.hang()
        await engine.close()
        assert asyncio.get_running_loop().time() == 1.5 + CLOSE_TIMEOUT_S
        with pytest.raises(EngineError, match="engine of 'solver' is closed"):
            await reader
        await asyncio.sleep(0)
        assert not controllers_tasks(worker)
        assert worker.stopped, "its device must be free for another"

    run_virtual(scenario())


def test_the_pool_moves_what_a_dead_worker_left_to_another_instance():
    async def scenario():
        workers = [scripted_worker(1.0, name=f"engine/solver/{n}") for n in range(2)]
        engines = [RemoteEngine(worker, POLICY) for worker in workers]
        async with InferencePool({POLICY: engines}) as pool:
            calls = [asyncio.create_task(pool.generate(request(i, max_tokens=5))) for i in range(6)]
            await asyncio.sleep(2.5)
            workers[0].die()
            assert {len(one.response_ids) for one in await asyncio.gather(*calls)} == {5}
            assert "engine/solver/0 died in collect" in pool.lost["solver/0"]
            assert len(workers[1].hosted._engine.requests) == 6

    run_virtual(scenario())


reads = st.tuples(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=4),  # ids, some taken; tokens
    st.sampled_from([0.0, 0.3, 1.0, 2.2]),  # when it begins
    st.sampled_from([None, 0.0, 0.5, 1.0, 3.0]),  # how long the reader stays
)


@given(
    plan=st.lists(reads, max_size=6),
    aborts=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), st.integers(0, 5)), max_size=5),
    death=st.sampled_from([None, 0.0, 0.7, 2.0, 4.0]),
    latency_s=st.sampled_from([0.0, 0.25, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_crosses_every_reader_ends_and_nothing_is_left_behind(plan, aborts, death, latency_s):
    async def read(engine, wanted, begins, stays):
        await asyncio.sleep(begins)
        requests = [request(name, max_tokens=tokens) for name, tokens in wanted]
        got = []
        try:
            async with asyncio.timeout(stays):
                async for generation in engine.generate(requests):
                    got.append(generation)
        except TimeoutError:
            return
        except EngineError:
            assert death is not None
            return
        assert sorted(one.request_id for one in got) == sorted(one.request_id for one in requests)

    async def scenario():
        worker = scripted_worker(0.5, latency_s=latency_s)
        engine = RemoteEngine(worker, POLICY)

        async def abort(when, name):
            await asyncio.sleep(when)
            await engine.abort([str(name)])

        async def die(when):
            await asyncio.sleep(when)
            worker.die()

        async with asyncio.TaskGroup() as tasks:
            for one in plan:
                tasks.create_task(read(engine, *one))
            for one in aborts:
                tasks.create_task(abort(*one))
            if death is not None:
                tasks.create_task(die(death))
        await asyncio.sleep(100)
        use = await engine.usage()
        assert (use.queued, use.running, use.queued_tokens) == (0, 0, 0)
        assert not controllers_tasks(worker)
        if death is None:
            assert not worker.hosted._done
            assert not worker.hosted._readers
            assert (await worker.hosted._engine.usage()).running == 0
        await engine.close()

    run_virtual(scenario())


def no_model():
    return load_model("no/such/folder")


def test_what_prevents_an_engine_from_being_made_says_so():
    make = partial(host_engine, tiny.settings(), policy=POLICY, make_decode=decode_letters, make_store=the_store)
    with pytest.raises(ConfigError, match="loading the model 'no/such/folder'"):
        make(make_model=no_model)
    with pytest.raises(EngineError, match=r"policies.solver.engine: making an engine on cuda:99: "):
        make(make_model=tiny.qwen3, device="cuda:99")
