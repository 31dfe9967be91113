"""The embedded engine behind its async interface."""

import asyncio

import numpy as np
import pytest
import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import EngineError
from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.backends.embedded.weights import without_ties
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import ENGINES, EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import PublishedAdapter, checksum, weights_key
from flexmarl.records import FinishReason, Version
from flexmarl.testing.inference import check_inference_engine
from tests.unit.inference import models as tiny
from tests.unit.inference.models import POLICY, request

FIRST = Version(1)


class World:
    """A store, a thread, and engines on them."""

    def __init__(self):
        self.store, self.thread = InlineObjectStore(), DeviceThread("test")

    def engine(self, *, deterministic=False, verify="full", **changes):
        parts = EngineParts(
            policy=POLICY,
            make_model=tiny.qwen3,
            decode=tiny.letters,
            store=self.store,
            thread=self.thread,
            deterministic=deterministic,
            verify=verify,
        )
        engine = make_engine(tiny.settings(**changes), parts)
        assert isinstance(engine, EmbeddedEngine)
        return engine

    async def publish(self, version=FIRST):
        return (await self.store.set(weights_key(POLICY, version), tiny.qwen3(1).state_dict())).checksum


def in_world(scenario):
    """Runs `scenario(world)` on a real event loop."""

    async def main():
        world = World()
        try:
            return await scenario(world)
        finally:
            world.thread.close()

    return asyncio.run(main())


async def collect(engine, requests):
    return {generation.request_id: generation async for generation in engine.generate(requests)}


async def generated(engine, tokens):
    """Returns once the engine has sampled so many tokens."""
    while (await engine.usage()).generated_tokens < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_it_conforms():
    async def scenario(world):
        async def make():
            return world.engine()

        await check_inference_engine(make, policy=POLICY, stop_text=tiny.letters, publish=world.publish)

    in_world(scenario)


def test_it_conforms_in_deterministic_mode():
    async def scenario(world):
        async def make():
            return world.engine(deterministic=True)

        await check_inference_engine(make, policy=POLICY, stop_text=tiny.letters)

    in_world(scenario)


def test_concurrent_calls_share_the_batch_and_get_only_their_own_answers():
    async def scenario(world):
        async with world.engine() as engine:
            calls = [[request(f"{c}/{i}", max_tokens=3 + i + c, seed=i) for i in range(3)] for c in range(4)]
            results = await asyncio.gather(*(collect(engine, call) for call in calls))
            for call, result in zip(calls, results, strict=True):
                lengths = {name: len(generation.response_ids) for name, generation in result.items()}
                assert lengths == {one.request_id: one.sampling.max_tokens for one in call}

    in_world(scenario)


def test_leaving_the_iterator_early_aborts_the_rest_and_frees_the_slots():
    async def scenario(world):
        async with world.engine(slots=1) as engine:
            answers = engine.generate([request("short", max_tokens=1), request("long", max_tokens=90)])
            assert (await anext(answers)).request_id == "short"
            await answers.aclose()
            assert len((await collect(engine, [request("next", max_tokens=2)]))["next"].response_ids) == 2
            assert (await engine.usage()).generated_tokens < 40

    in_world(scenario)


def test_an_id_may_come_again_as_soon_as_its_caller_has_left_and_gets_an_answer_of_its_own():
    async def scenario(world):
        async with world.engine(steps_per_turn=1) as engine:
            left = engine.generate([request("r", max_tokens=90)])
            reader = asyncio.ensure_future(anext(left))
            await generated(engine, 5)
            reader.cancel()
            await asyncio.wait([reader])
            answers = await collect(engine, [request("r", max_tokens=3)])
            assert (answers["r"].finish, len(answers["r"].response_ids)) == (FinishReason.LENGTH, 3)

    in_world(scenario)


def test_who_leaves_with_an_answer_unread_ends_no_later_request_of_that_id():
    async def scenario(world):
        async with world.engine(steps_per_turn=1) as engine:
            left = engine.generate([request("a", max_tokens=1), request("r", max_tokens=1)])
            await anext(left)
            await generated(engine, 2)
            reader = asyncio.create_task(collect(engine, [request("r", max_tokens=20)]))
            await generated(engine, 7)
            await left.aclose()
            assert len((await reader)["r"].response_ids) == 20

    in_world(scenario)


def test_weights_change_between_turns_and_running_requests_record_it():
    async def scenario(world):
        async with world.engine(steps_per_turn=1) as engine:
            expected = await world.publish()
            reader = asyncio.create_task(collect(engine, [request("r", max_tokens=90)]))
            await generated(engine, 5)
            assert await engine.load_weights(POLICY, FIRST) == expected
            versions = (await reader)["r"].versions
            assert [run.version for run in versions] == [0, 1]
            assert versions[1].start >= 5

    in_world(scenario)


def test_with_verify_names_it_vouches_for_names_and_shapes_alone_and_the_pool_takes_that():
    async def scenario(world):
        engine = world.engine(verify="names")
        published = await world.publish()
        async with InferencePool({POLICY: [engine]}).open() as pool:
            held = await pool.load_weights(POLICY, FIRST, published)
            assert held == {"solver/0": published.partition(":")[0]}
            await world.publish(Version(2))
            other = checksum({"another": tiny.torch.zeros(1)})
            with pytest.raises(EngineError, match="version 2 has checksum"):
                await pool.load_weights(POLICY, Version(2), other)
        await engine.close()

    in_world(scenario)


class CountsGets(InlineObjectStore):
    """A store that knows how often weights were asked for by `get` alone, and how often by `get_into`."""

    gets = fills = 0
    filling = False

    async def get(self, key):
        self.gets += not self.filling
        return await super().get(key)

    async def get_into(self, key, tree, **options):
        self.filling = True
        self.fills += 1
        try:
            return await super().get_into(key, tree, **options)
        finally:
            self.filling = False


def test_weights_in_the_models_own_layout_are_copied_straight_into_it_and_others_as_views():
    async def scenario(world):
        world.store = CountsGets()
        full = tiny.qwen3(1).state_dict()
        own = without_ties(tiny.qwen3(1))
        assert own.keys() < full.keys(), "the model has tied weights"
        answers = []
        async with world.engine() as engine:
            for version, tree in enumerate((own, full), start=1):
                meta = await world.store.set(weights_key(POLICY, Version(version)), tree)
                assert await engine.load_weights(POLICY, Version(version)) == meta.checksum
                assert world.store.gets == version - 1
                done = await collect(engine, [request(f"r{version}", max_tokens=9, temperature=0.0)])
                answers.append(done[f"r{version}"].response_ids.tolist())
        assert answers[0] == answers[1]

    in_world(scenario)


def test_only_the_first_adapter_is_tried_as_whole_weights_which_may_come_again_all_the_same():
    base, layer = without_ties(tiny.qwen3()), "model.layers.0.self_attn.q_proj"
    rows, columns = base[f"{layer}.weight"].shape
    first, second = (
        PublishedAdapter({layer: (torch.ones(2, columns), torch.full((rows, 2), n))}, 1.0, checksum(base)).as_tree()
        for n in (0.1, 0.2)
    )

    async def scenario(world):
        world.store = CountsGets()
        asked = []
        async with world.engine() as engine:
            for version, tree in enumerate((first, second, base, base, first), start=1):
                meta = await world.store.set(weights_key(POLICY, Version(version)), tree)
                assert await engine.load_weights(POLICY, Version(version)) == meta.checksum
                asked.append((world.store.fills, world.store.gets))
        assert asked == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 4)]

    in_world(scenario)


def test_a_load_that_does_not_fit_names_the_object_and_keeps_the_old_weights():
    async def scenario(world):
        async with world.engine() as engine:
            await world.store.set(weights_key(POLICY, FIRST), {"x": tiny.torch.zeros(1)})
            with pytest.raises(EngineError, match="no weight 'x'"):
                await engine.load_weights(POLICY, FIRST)
            with pytest.raises(EngineError, match=r"loading 'weights/solver/2'.*no object 'weights/solver/2'"):
                await engine.load_weights(POLICY, Version(2))
            with pytest.raises(EngineError, match="serves policy 'solver', not 'other'"):
                await engine.load_weights("other", FIRST)
            assert (await engine.usage()).version == 0

    in_world(scenario)


def test_a_request_of_another_policy_or_with_a_running_id_fails_alone():
    async def scenario(world):
        async with world.engine() as engine:
            foreign = request("foreign")
            object.__setattr__(foreign, "policy", "verifier")
            got = [g async for g in engine.generate([foreign, request("a"), request("a")])]
            assert [(g.request_id, g.finish) for g in got] == [
                ("foreign", FinishReason.ERROR),
                ("a", FinishReason.ERROR),
                ("a", FinishReason.LENGTH),
            ]
            assert "serves policy 'solver', not 'verifier'" in got[0].error
            assert "'a' is in use" in got[1].error

    in_world(scenario)


def test_a_failing_model_ends_every_call_with_an_engine_error_and_nobody_hangs(monkeypatch):
    async def scenario(world):
        engine = world.engine()
        await collect(engine, [request("warm")])

        def broken(self):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(EngineCore, "step", broken)
        outcomes = await asyncio.gather(
            *(collect(engine, [request(name, max_tokens=50)]) for name in "abc"), return_exceptions=True
        )
        assert all(isinstance(outcome, EngineError) and "out of memory" in str(outcome) for outcome in outcomes)
        with pytest.raises(EngineError, match="out of memory"):
            await collect(engine, [request("later")])
        await engine.close()

    in_world(scenario)


def test_closing_answers_running_requests_with_abort_and_leaves_no_task():
    async def scenario(world):
        engine = world.engine()
        reader = asyncio.create_task(collect(engine, [request(name, max_tokens=90) for name in "abcdef"]))
        await generated(engine, 3)
        await engine.close()
        answers = await reader
        assert {answer.finish for answer in answers.values()} == {FinishReason.ABORT}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    in_world(scenario)


def test_a_trainer_on_the_same_thread_gets_its_turn_between_steps():
    async def scenario(world):
        async with world.engine(steps_per_turn=1) as engine:
            reader = asyncio.create_task(collect(engine, [request("r", max_tokens=90)]))
            await generated(engine, 2)
            await world.thread.run(np.sum, [1, 2])
            assert (await engine.usage()).generated_tokens < 90
            await reader

    in_world(scenario)


def test_a_decode_step_has_its_own_threads_and_a_trainer_on_the_same_thread_keeps_its_number(monkeypatch):
    seen = []
    step = EngineCore.step

    def watched(core):
        seen.append(torch.get_num_threads())
        return step(core)

    monkeypatch.setattr(EngineCore, "step", watched)

    async def scenario(world):
        await world.thread.run(torch.set_num_threads, 1)
        async with world.engine(threads=2) as engine:
            await collect(engine, [request("r", max_tokens=3)])
        assert set(seen) == {2}
        assert await world.thread.run(torch.get_num_threads) == 1

    in_world(scenario)


def test_the_table_of_engines_holds_settings_classes_with_a_type_and_a_factory():
    assert list(ENGINES.built_in) == ["embedded", "openai", "scripted", "timed", "vllm"]
    assert ENGINES["embedded"] is EmbeddedSettings
    assert EmbeddedSettings().type == "embedded"


def untied(number):
    """The weights of a model as a trainer publishes them."""
    return {name: tensor.detach() for name, tensor in without_ties(tiny.qwen3(number)).items()}


@pytest.mark.parametrize("verify", ["full", "names"])
@pytest.mark.parametrize("tree", [untied, lambda number: tiny.qwen3(number).state_dict()], ids=["once", "tied twice"])
def test_asleep_it_has_no_weights_that_the_store_has_and_awake_the_same_bits(verify, tree):
    async def scenario(world):
        await world.store.set(weights_key(POLICY, FIRST), tree(1))
        expected = checksum(untied(1))
        engine = world.engine(verify=verify)
        await engine.sleep()
        assert all(p.numel() for p in engine._core._model.parameters()), "those of its files are nowhere else"
        await engine.wake()
        await engine.load_weights(POLICY, FIRST)
        undisturbed = await collect(engine, [request("r", [1, 2, 3], seed=5, max_tokens=20)])
        asking = asyncio.create_task(collect(engine, [request("r", [1, 2, 3], seed=5, max_tokens=20)]), name="asking")
        before = (await engine.usage()).generated_tokens
        await generated(engine, before + 1)
        await engine.sleep()
        model = engine._core._model
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters()), "it holds no weight"
        await engine.wake()
        assert checksum(without_ties(model)) == expected
        assert (await asking)["r"].response_ids.tolist() == undisturbed["r"].response_ids.tolist()
        assert (await asking)["r"].logprobs.tolist() == undisturbed["r"].logprobs.tolist()
        await engine.close()

    in_world(scenario)


def test_weights_that_come_while_it_has_none_are_those_that_it_wakes_with():
    async def scenario(world):
        await world.publish()
        second = (await world.store.set(weights_key(POLICY, Version(2)), untied(2))).checksum
        engine = world.engine()
        await engine.load_weights(POLICY, FIRST)
        await engine.sleep()
        assert await engine.load_weights(POLICY, Version(2)) == second
        await world.store.release(weights_key(POLICY, FIRST))
        await engine.wake()
        assert checksum(without_ties(engine._core._model)) == second
        await engine.close()

    in_world(scenario)


def test_an_engine_whose_version_is_gone_or_another_one_does_not_wake():
    async def scenario(world):
        await world.publish()
        engine, other = world.engine(), world.engine()
        for one in (engine, other):
            await one.load_weights(POLICY, FIRST)
            await one.sleep()
        await world.store.release(weights_key(POLICY, FIRST))
        with pytest.raises(EngineError, match="waking the engine of 'solver'"):
            await engine.wake()
        await world.store.set(weights_key(POLICY, FIRST), tiny.qwen3(2).state_dict())
        with pytest.raises(EngineError, match=r"version 1 had checksum .*, but it came back with"):
            await other.wake()
        assert (await other.usage()).running == 0
        await engine.close()
        await other.close()

    in_world(scenario)
