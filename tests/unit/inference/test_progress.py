"""What is told of an answer while it is sampled: by the embedded engine, and through the pool."""

import asyncio
from collections import defaultdict
from dataclasses import replace
from functools import reduce

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.inference.calls import joined
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import FinishReason, Generation, GenerationProgress, PolicyName, Version, VersionRun
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, utf8_ids, utf8_text
from tests.unit.inference.models import POLICY, request
from tests.unit.inference.test_embedded_engine import FIRST, generated, in_world
from tests.unit.inference.test_embedded_memory import BLOCK, BLOCK_BYTES

LETTERS = "abcdefghij"
OTHER = PolicyName("writer")


def streaming(name, **changes):
    return replace(request(name, **changes), streams=True)


async def read(engine, requests):
    """The parts and the answer of each request, in the order in which they came."""
    parts, answers = defaultdict(list), {}
    async for one in engine.generate(requests):
        if isinstance(one, GenerationProgress):
            assert one.request_id not in answers
            parts[one.request_id].append(one.part)
        else:
            answers[one.request_id] = one
    return parts, answers


def begins(told, whole):
    """The parts, joined, are a beginning of the answer: ids, both log-probabilities, version runs."""
    size = len(told.response_ids)
    assert 0 < size < len(whole.response_ids)
    for name in ("response_ids", "logprobs", "raw_logprobs"):
        assert np.array_equal(getattr(told, name), getattr(whole, name)[:size]), name
    assert told.versions == tuple(run for run in whole.versions if run.start < size)


def test_the_first_token_is_told_at_once_and_the_others_after_every_turn():
    async def scenario(world):
        async with world.engine(steps_per_turn=4) as engine:
            parts, answers = await read(engine, [streaming("told", max_tokens=10), request("silent", max_tokens=10)])
            assert [len(part.response_ids) for part in parts["told"]] == [1, 4, 4]
            assert parts.keys() == {"told"}
            begins(reduce(joined, parts["told"]), answers["told"])

    in_world(scenario)


def test_what_is_told_across_a_load_has_the_versions_of_the_answer():
    async def scenario(world):
        async with world.engine(steps_per_turn=1) as engine:
            await world.publish()
            reader = asyncio.create_task(read(engine, [streaming("r", max_tokens=90)]))
            await generated(engine, 5)
            await engine.load_weights(POLICY, FIRST)
            parts, answers = await reader
            begins(reduce(joined, parts["r"]), answers["r"])
            assert {run.version for part in parts["r"] for run in part.versions} == {0, 1}

    in_world(scenario)


def test_a_request_that_gave_its_memory_back_is_told_nothing_twice():
    async def scenario(world):
        room = {"kv_block": BLOCK, "kv_gib": 24 * BLOCK_BYTES / 2**30, "kept_prefixes": 0}
        async with world.engine(slots=4, max_len=64, **room) as engine:
            requests = [streaming(str(i), max_tokens=40) for i in range(4)]
            parts, answers = await read(engine, requests)
            assert (await engine.usage()).preempted > 0, "witness"
            for name, whole in answers.items():
                begins(reduce(joined, parts[name]), whole)

    in_world(scenario)


class Telling(ScriptedEngine):
    """Tells a letter a second. It is lost after `dies_after` of them."""

    def __init__(self, dies_after=1000, **changes):
        super().__init__(lambda one: LETTERS, **changes)
        self.dies_after = dies_after

    async def generate(self, requests):
        (one,) = self.requests[len(self.requests) :] = list(requests)
        reply = utf8_ids(LETTERS)[one.offset :][: one.sampling.max_tokens]
        for place, letter in enumerate(reply):
            await asyncio.sleep(1.0)
            if place == self.dies_after:
                raise EngineError("its machine is gone")
            if place < len(reply) - 1 and one.streams:
                yield GenerationProgress(request_id=one.request_id, part=self.part(one, [letter]))
        yield replace(self.part(one, reply), finish=FinishReason.STOP)

    def part(self, one, ids):
        values = -np.asarray(ids, np.float32)
        return Generation(
            request_id=one.request_id,
            response_ids=np.asarray(ids, np.int32),
            logprobs=values,
            raw_logprobs=values,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.ABORT,
        )


def test_behind_what_was_told_by_a_lost_instance_another_one_goes_on():
    async def scenario():
        engines, heard = [Telling(dies_after=3), Telling(dies_after=4), Telling()], []
        async with InferencePool({POLICY: engines}).open() as pool:
            one = request("r", max_tokens=10)
            answer = await pool.generate(one, on_tokens=lambda ids: heard.append(utf8_text(ids.tolist())))
            assert len(pool.lost) == 2
        assert "".join(heard) == LETTERS[:-1], "each once, in order; the last one comes with the answer"
        assert utf8_text(answer.response_ids.tolist()) == LETTERS
        assert answer.logprobs.tolist() == [-letter for letter in utf8_ids(LETTERS)]
        assert answer.finish is FinishReason.STOP
        asked = [engine.requests[0] for engine in engines if engine.requests]
        assert [(one.offset, one.sampling.max_tokens) for one in asked] == [(0, 10), (3, 7), (7, 3)]

    run_virtual(scenario())


def test_without_a_listener_nothing_is_told_and_a_lost_instance_is_made_up_for_from_the_start():
    async def scenario():
        engines = [Telling(dies_after=3), Telling()]
        async with InferencePool({POLICY: engines}).open() as pool:
            answer = await pool.generate(request("r", max_tokens=10))
        assert utf8_text(answer.response_ids.tolist()) == LETTERS
        assert [engine.requests[0].offset for engine in engines] == [0, 0]
        assert not any(engine.requests[0].streams for engine in engines)

    run_virtual(scenario())


def test_a_caller_that_leaves_in_the_middle_gets_all_that_was_sampled():
    async def scenario():
        heard, left = [], []
        async with InferencePool({POLICY: [Telling()]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            one = request("r", max_tokens=10)
            asking = asyncio.create_task(pool.generate(one, interrupted=left.append, on_tokens=heard.append))
            await asyncio.sleep(3.5)
            asking.cancel()
            await asyncio.wait([asking])
            assert len(heard) == 3
            answer = await left[0]
            assert utf8_text(answer.response_ids.tolist()) == LETTERS[:5], "with those of the grace of two seconds"
            assert answer.logprobs.tolist() == [-letter for letter in utf8_ids(LETTERS[:5])]

    run_virtual(scenario())


def test_a_modelled_engine_tells_after_every_step_also_across_a_load_and_a_loss():
    async def scenario():
        engines = [ScriptedEngine(lambda one: LETTERS, latency_s=1.0) for _ in range(2)]
        heard = []

        def on_tokens(ids):
            heard.append((asyncio.get_running_loop().time(), utf8_text(ids.tolist())))

        async with InferencePool({POLICY: engines}).open() as pool:
            asking = asyncio.create_task(pool.generate(request("r", max_tokens=10), on_tokens=on_tokens))
            await asyncio.sleep(3.5)
            await pool.load_weights(POLICY, FIRST)
            engines[0].fail("its machine is gone")
            answer = await asking
        assert "".join(letters for _, letters in heard) == LETTERS[:-1]
        assert [when for when, _ in heard][:3] == [1.0, 2.0, 3.0]
        assert utf8_text(answer.response_ids.tolist()) == LETTERS
        assert [(run.start, run.version) for run in answer.versions] == [(0, 0), (3, FIRST)]

    run_virtual(scenario())


def test_what_a_moved_instance_had_not_told_yet_is_told_before_another_one_goes_on():
    async def scenario():
        engines, heard = [ScriptedEngine(lambda one: LETTERS, latency_s=1.0) for _ in range(3)], []
        pool = InferencePool({POLICY: engines[:2], OTHER: engines[2:]}, PoolSettings(on_move="continue"))
        async with pool.open():
            for policy in (POLICY, OTHER):
                await pool.load_weights(policy, FIRST)
            one = request("r", max_tokens=10)
            asking = asyncio.create_task(
                pool.generate(one, on_tokens=lambda ids: heard.append(utf8_text(ids.tolist())))
            )
            await asyncio.sleep(3.5)
            busy = next(name for name, use in (await pool.usage()).items() if use.running)
            await pool.move(busy, to=OTHER)
            answer = await asking
        assert heard[:4] == ["a", "b", "c", "d"], "the fourth was sampled, and not told when it moved"
        assert "".join(heard) == LETTERS[:-1]
        assert utf8_text(answer.response_ids.tolist()) == LETTERS

    run_virtual(scenario())


class Early(Telling):
    """Tells tokens of a version that it has not loaded."""

    def part(self, one, ids):
        return replace(super().part(one, ids), versions=(VersionRun(0, Version(5)),))


def test_nothing_is_heard_of_a_version_that_the_instance_has_not_acknowledged():
    async def scenario():
        engines, heard = [Early(), Telling()], []
        async with InferencePool({POLICY: engines}).open() as pool:
            one = request("r", max_tokens=10)
            answer = await pool.generate(one, on_tokens=lambda ids: heard.append(utf8_text(ids.tolist())))
            assert "has acknowledged 0" in str(pool.lost)
        assert "".join(heard) == LETTERS[:-1]
        assert {run.version for run in answer.versions} == {0}

    run_virtual(scenario())
