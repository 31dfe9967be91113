"""An engine that lives elsewhere, called through its proxy: real engines, and scripted ones in virtual time."""

import asyncio
import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.proxy import CLOSE_TIMEOUT_S
from flexmarl.errors import EngineError
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, weights_key
from flexmarl.records import FinishReason, Version, WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine, utf8_text
from tests.unit.hosted import engine_spec, resident_of
from tests.unit.inference import models as tiny
from tests.unit.inference.models import POLICY, request

STORE = InlineObjectStore()


def embedded():
    parts = EngineParts(
        policy=POLICY, make_model=tiny.qwen3, decode=tiny.letters, store=STORE, thread=DeviceThread("engine-solver")
    )
    return make_engine(tiny.settings(), parts)


def say(one):
    return "abcdefghijklmnop" * 4


def scripted(token_s=1.0, number=0):
    return engine_spec(partial(ScriptedEngine, say, latency_s=token_s), number)


async def collect(engine, requests):
    return {generation.request_id: generation async for generation in engine.generate(requests)}


def controllers_tasks(resident):
    """Those of the proxy; the engine's own end with its resident."""
    return [task for task in asyncio.all_tasks() if task.get_name() == f"exchange-{resident.name}"]


def test_an_embedded_engine_conforms_through_its_proxy():
    numbers = itertools.count()

    async def publish(version):
        return (await STORE.set(weights_key(POLICY, version), tiny.qwen3(1).state_dict())).checksum

    async def check():
        async with inproc_cluster(crosses=True) as cluster:

            async def make():
                (resident,) = await cluster.spawn([engine_spec(embedded, next(numbers))])
                return resident.remote

            await check_inference_engine(make, policy=POLICY, stop_text=tiny.letters, publish=publish)

    asyncio.run(check())


@pytest.mark.parametrize(("token_s", "latency_s"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.2)])
def test_a_scripted_engine_conforms_through_its_proxy(token_s, latency_s):
    numbers = itertools.count()

    async def publish(version):
        return Checksum(f"sum:weights/{POLICY}/{version}")

    async def check():
        async with inproc_cluster(crosses=True, latency_s=latency_s) as cluster:

            async def make():
                (resident,) = await cluster.spawn([scripted(token_s, next(numbers))])
                return resident.remote

            await check_inference_engine(make, policy=POLICY, stop_text=utf8_text, publish=publish)

    run_virtual(check())


def test_a_resident_that_dies_fails_every_call_with_the_reason_and_every_later_one():
    async def scenario():
        async with resident_of(scripted()) as resident:
            engine = resident.remote
            readers = [asyncio.create_task(collect(engine, [request(name, max_tokens=50)])) for name in "abc"]
            await asyncio.sleep(3.5)
            use = await engine.usage()
            assert use.queued + use.running == 3
            resident.die()
            for outcome in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert "engine/solver/0: it was lost in 'generate': engine/solver/0 died: was killed" in str(outcome)
            with pytest.raises(EngineError, match="died: was killed"):
                await collect(engine, [request("later")])
            with pytest.raises(EngineError, match="died: was killed"):
                await engine.load_weights(POLICY, Version(1))
            await engine.close()
            assert not controllers_tasks(resident)

    run_virtual(scenario())


def test_requests_of_one_tick_and_the_answers_to_them_are_one_crossing():
    async def scenario():
        async with resident_of(scripted(0.1), latency_s=0.01) as resident:
            readers = [asyncio.create_task(collect(resident.remote, [request(i, max_tokens=5)])) for i in range(20)]
            await asyncio.gather(*readers)
            assert resident.crossings == ["exchange"]

    run_virtual(scenario())


def test_usage_counts_what_waits_and_what_runs():
    async def scenario():
        async with resident_of(scripted(1.0)) as resident:
            engine = resident.remote
            wanted = [request(name, max_tokens=n) for name, n in (("a", 2), ("b", 9))]
            reader = asyncio.create_task(collect(engine, wanted))
            await asyncio.sleep(0.5)
            use = await engine.usage()
            assert (use.queued + use.running, use.queued_tokens) == (2, 9), "of each, the token under way counts"
            await asyncio.sleep(2)
            use = await engine.usage()
            assert (use.queued + use.running, use.queued_tokens) == (1, 6)
            await reader

    run_virtual(scenario())


def test_answers_that_are_there_together_cross_together():
    async def scenario():
        async with resident_of(scripted(1.0), latency_s=0.1) as resident:
            lengths = (2, 2, 2, 5, 5)
            got = await asyncio.gather(
                *(collect(resident.remote, [request(i, max_tokens=length)]) for i, length in enumerate(lengths))
            )
            assert [len(answers[str(i)].response_ids) for i, answers in enumerate(got)] == list(lengths)
            assert resident.crossings == ["exchange", "exchange"]

    run_virtual(scenario())


def test_leaving_the_iterator_early_aborts_the_rest_and_leaves_nothing_on_either_side():
    async def scenario():
        async with resident_of(scripted(1.0), latency_s=0.1) as resident:
            engine = resident.remote
            answers = engine.generate([request("short", max_tokens=1), request("long", max_tokens=60)])
            assert (await anext(answers)).request_id == "short"
            await answers.aclose()
            await asyncio.sleep(3)
            assert len((await collect(engine, [request("long", max_tokens=2)]))["long"].response_ids) == 2
            use = await engine.usage()
            assert (use.running, use.queued_tokens) == (0, 0)
            assert (await resident.hosted.usage()).running == 0
            assert not controllers_tasks(resident)
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("read-")]

    run_virtual(scenario())


def test_a_repeated_id_is_refused_alone_and_its_first_bearer_served():
    async def scenario():
        async with resident_of(scripted(1.0)) as resident:
            engine = resident.remote
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
        async with resident_of(scripted(1.0)) as resident:
            readers = [asyncio.create_task(collect(resident.remote, [request(name, max_tokens=9)])) for name in "ab"]
            await asyncio.sleep(2.5)
            resident.hosted.fail("out of memory")
            for outcome in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(outcome, EngineError)
                assert str(outcome) == "out of memory"

    run_virtual(scenario())


class Forgetful(ScriptedEngine):
    async def generate(self, requests):
        async for generation in super().generate(requests[:-1]):
            yield generation


def test_an_engine_that_leaves_a_request_without_an_answer_is_lost_rather_than_waited_for():
    async def scenario():
        spec = engine_spec(partial(Forgetful, say))
        async with resident_of(spec) as resident, InferencePool({POLICY: [resident.remote]}).open() as pool:
            calls = [asyncio.create_task(pool.generate(request(name, max_tokens=1))) for name in "ab"]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["EngineError", "Generation"]
            assert pool.lost == {"solver/0": "it left 1 requests without an answer"}

    run_virtual(scenario())


def test_a_load_that_fails_keeps_the_engine_and_its_version():
    def refuse(key):
        raise EngineError(f"no weight 'x' in {key}")

    async def scenario():
        async with resident_of(scripted(1.0)) as resident:
            engine = resident.remote
            resident.hosted._checksum = refuse
            with pytest.raises(EngineError, match="no weight 'x' in weights/solver/1"):
                await engine.load_weights(POLICY, Version(1))
            assert (await engine.usage()).version == 0
            assert len(await collect(engine, [request("a", max_tokens=2)])) == 1

    run_virtual(scenario())


def test_closing_does_not_wait_for_ever_for_a_resident_that_hangs():
    async def scenario():
        async with resident_of(scripted(1.0)) as resident:
            reader = asyncio.create_task(collect(resident.remote, [request("a", max_tokens=60)]))
            await asyncio.sleep(1.5)
            resident.hang()
            await resident.remote.close()
            assert asyncio.get_running_loop().time() == 1.5 + CLOSE_TIMEOUT_S
            with pytest.raises(EngineError, match="engine/solver/0 is closed"):
                await reader
            await asyncio.sleep(0)
            assert not controllers_tasks(resident)
            assert not resident.alive, "its device must be free for another"

    run_virtual(scenario())


def test_the_pool_moves_what_a_dead_resident_left_to_another_instance():
    async def scenario():
        async with inproc_cluster(crosses=True) as cluster:
            residents = await cluster.spawn([scripted(1.0, n) for n in range(2)])
            async with InferencePool({POLICY: [resident.remote for resident in residents]}).open() as pool:
                calls = [asyncio.create_task(pool.generate(request(i, max_tokens=5))) for i in range(6)]
                await asyncio.sleep(2.5)
                cluster.kill(WorkerId("engine", "solver", 0))
                assert {len(one.response_ids) for one in await asyncio.gather(*calls)} == {5}
                assert "engine/solver/0 died: was killed" in pool.lost["solver/0"]
                assert len(cluster.residents[1].hosted.requests) == 6

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
        async with resident_of(scripted(0.5), latency_s=latency_s) as resident:
            engine = resident.remote

            async def abort(when, name):
                await asyncio.sleep(when)
                try:
                    await engine.abort([str(name)])
                except EngineError:
                    assert death is not None

            async def die(when):
                await asyncio.sleep(when)
                resident.die()

            async with asyncio.TaskGroup() as tasks:
                for one in plan:
                    tasks.create_task(read(engine, *one))
                for one in aborts:
                    tasks.create_task(abort(*one))
                if death is not None:
                    tasks.create_task(die(death))
            await asyncio.sleep(100)
            assert not controllers_tasks(resident)
            if death is None:
                use = await engine.usage()
                assert (use.queued, use.running, use.queued_tokens) == (0, 0, 0)
                assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("read-")]
                assert (await resident.hosted.usage()).running == 0
            await engine.close()

    run_virtual(scenario())
