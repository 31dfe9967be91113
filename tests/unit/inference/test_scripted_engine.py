"""The scripted engine, and that the conformance suite notices engines which break the contract."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from flexmarl.errors import EngineError
from flexmarl.inference.interface import EngineCapabilities, answers_of
from flexmarl.objects.interface import Checksum
from flexmarl.records import Generation, GenerationProgress, Version, VersionRun
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import (
    FrozenEngine,
    ScriptedEngine,
    check_frozen_engine,
    check_inference_engine,
    utf8_text,
)
from tests.unit.inference.models import POLICY, request

SCRIPT = "abcdefghijklmnop" * 4


def make(kind=ScriptedEngine, **changes):
    async def make_engine():
        return kind(lambda one: SCRIPT, **{"latency_s": 0.01, **changes})

    return make_engine


async def publish(version):
    return Checksum(f"sum:weights/{POLICY}/{version}")


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_the_scripted_engine_conforms(latency_s):
    run_virtual(check_inference_engine(make(latency_s=latency_s), policy=POLICY, stop_text=utf8_text, publish=publish))


class Forgetful(ScriptedEngine):
    async def generate(self, requests):
        async for generation in super().generate(requests[:-1]):
            yield generation


class Overlong(ScriptedEngine):
    async def generate(self, requests):
        endless = [replace(one, sampling=replace(one.sampling, max_tokens=64)) for one in requests]
        async for generation in super().generate(endless):
            yield generation


class Liar(ScriptedEngine):
    async def load_weights(self, policy, version):
        await super().load_weights(policy, version)
        return Checksum("whatever")


class Immortal(ScriptedEngine):
    async def close(self):
        await self.abort([one.request_id for one in self.requests])


class Insomniac(ScriptedEngine):
    async def sleep(self):
        return


class Dutiful(ScriptedEngine):
    async def abort(self, request_ids):
        return


class Claims(ScriptedEngine):
    """Claims what the frozen engine has not."""

    load_weights = sleep = wake = None


class Fickle(ScriptedEngine):
    async def capabilities(self):
        return EngineCapabilities(deterministic=not self.requests)


class Muddled(ScriptedEngine):
    """The company decides about the last bits."""

    async def generate(self, requests):
        async for one in answers_of(super(), requests):
            yield replace(one, logprobs=one.logprobs * np.float32(1 + 1e-6 * (len(requests) > 1)))


class Restarts(ScriptedEngine):
    """Says everything again to a request that another instance began."""

    async def generate(self, requests):
        async for one in super().generate([replace(asked, offset=0) for asked in requests]):
            yield one


class Shaped(ScriptedEngine):
    """Its raw log-probabilities are those of the sampling distribution."""

    async def generate(self, requests):
        temperature = {asked.request_id: asked.sampling.temperature for asked in requests}
        async for one in answers_of(super(), requests):
            yield replace(one, raw_logprobs=one.raw_logprobs / np.float32(temperature[one.request_id]))


class Hasty(ScriptedEngine):
    """Tells the last token too."""

    async def generate(self, requests):
        async for one in super().generate(requests):
            if isinstance(one, Generation) and one.request_id == "telling":
                yield GenerationProgress(request_id="telling", part=replace(one, response_ids=one.response_ids[-1:]))
            yield one


class Stutters(ScriptedEngine):
    """Tells everything twice."""

    async def generate(self, requests):
        async for one in super().generate(requests):
            yield one
            if isinstance(one, GenerationProgress):
                yield one


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Forgetful, "exactly one answer"),
        (Overlong, "max_tokens was 5|completion order"),
        (Liar, "must hold what was published"),
        (Immortal, "a closed engine must raise"),
        (Dutiful, "finish must be abort"),
        (Insomniac, "an abort must be heard|must not sample"),
        (Claims, "its capabilities claim load_weights, which it does not have"),
        (Fickle, "capabilities must be the same at every call"),
        (Muddled, "claim that it is deterministic, but logprobs depend on the company"),
        (Restarts, "claim that it continues what another instance began"),
        (Shaped, "claim raw log-probabilities"),
        (Hasty, "the last token comes with the answer"),
        (Stutters, "the last token comes with the answer|response_ids that were told differ"),
    ],
)
def test_the_suite_notices_an_engine_that_breaks_the_contract(kind, complaint):
    with pytest.raises(AssertionError, match=complaint):
        run_virtual(check_inference_engine(make(kind), policy=POLICY, publish=publish))


def test_the_frozen_engine_conforms():
    async def make_frozen():
        return FrozenEngine(lambda one: SCRIPT, latency_s=0.01)

    run_virtual(check_frozen_engine(make_frozen, policy=POLICY, stop_text=utf8_text))


def test_the_frozen_suite_is_not_for_an_engine_that_loads_weights():
    with pytest.raises(AssertionError, match="must not claim that it loads weights"):
        run_virtual(check_frozen_engine(make(), policy=POLICY))


def test_a_load_in_the_middle_of_a_reply_is_recorded_at_its_token():
    async def scenario():
        engine = ScriptedEngine(lambda one: "abcdef", latency_s=1.0)
        answers = engine.generate([request("r", max_tokens=6)])
        reply = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(2.5)
        await engine.load_weights(POLICY, Version(1))
        assert (await reply).versions == (VersionRun(0, Version(0)), VersionRun(3, Version(1)))
        await answers.aclose()

    run_virtual(scenario())


def test_a_lost_engine_raises_for_running_and_later_calls():
    async def scenario():
        engine = ScriptedEngine(lambda one: "abc", latency_s=1.0)
        answers = engine.generate([request("r")])
        reply = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(0.5)
        engine.fail("gone")
        with pytest.raises(EngineError, match="gone"):
            await reply
        with pytest.raises(EngineError, match="gone"):
            await anext(engine.generate([request("s")]))

    run_virtual(scenario())
