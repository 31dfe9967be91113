"""The scripted engine, and that the conformance suite notices engines which break the contract."""

import asyncio

import pytest

from flexmarl.errors import EngineError
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import FinishReason, Version, VersionRun
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, check_inference_engine, utf8_text
from tests.unit.inference.models import POLICY, request

SCRIPT = "abcdefghijklmnop" * 4


def make(kind=ScriptedEngine, **changes):
    async def make_engine():
        return kind(lambda one: SCRIPT, **{"latency_s": 0.01, **changes})

    return make_engine


async def publish():
    return ObjectKey("weights/7"), Checksum("sum:weights/7")


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_the_scripted_engine_conforms(latency_s):
    run_virtual(check_inference_engine(make(latency_s=latency_s), policy=POLICY, stop_text=utf8_text, publish=publish))


class Forgetful(ScriptedEngine):
    async def generate(self, requests):
        async for generation in super().generate(requests[:-1]):
            yield generation


class Overlong(ScriptedEngine):
    def _cut(self, ids, sampling):
        return ids, FinishReason.STOP


class Liar(ScriptedEngine):
    async def load_weights(self, policy, version, key):
        await super().load_weights(policy, version, key)
        return Checksum("whatever")


class Immortal(ScriptedEngine):
    async def close(self):
        await self.abort(list(self._running))


class Insomniac(ScriptedEngine):
    async def sleep(self):
        return


class Dutiful(ScriptedEngine):
    async def abort(self, request_ids):
        return


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Forgetful, "exactly one answer"),
        (Overlong, "max_tokens was 5|completion order"),
        (Liar, "must hold what was published"),
        (Immortal, "a closed engine must raise"),
        (Dutiful, "finish must be abort"),
        (Insomniac, "an abort must be heard|must not sample"),
    ],
)
def test_the_suite_notices_an_engine_that_breaks_the_contract(kind, complaint):
    with pytest.raises(AssertionError, match=complaint):
        run_virtual(check_inference_engine(make(kind), policy=POLICY, publish=publish))


def test_a_load_in_the_middle_of_a_reply_is_recorded_at_its_token():
    async def scenario():
        engine = ScriptedEngine(lambda one: "abcdef", latency_s=1.0)
        answers = engine.generate([request("r", max_tokens=6)])
        reply = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(2.5)
        await engine.load_weights(POLICY, Version(1), ObjectKey("k"))
        assert (await reply).versions == (VersionRun(0, Version(0)), VersionRun(2, Version(1)))
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
