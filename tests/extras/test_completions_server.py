"""Frozen policies on a server: the engine `openai`, against a server on real sockets."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flexmarl.cli.needs import Finding, examine_servers
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.settings import OpenAISettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import FinishReason, Generation, GenerationRequest, PolicyName, Sampling
from flexmarl.testing.inference import check_frozen_engine
from tests.extras.completions_server import Told, completions_server, text_of

JUDGE = PolicyName("judge")
MATH_TEAM = Path("examples/math_team/cpu.yaml")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told) -> Iterator[str]:
    with completions_server(told) as url:
        yield url


def engine(url: str, **settings: Any):
    thread = DeviceThread()
    thread.close()  # It needs no device.
    parts = EngineParts(policy=JUDGE, make_model=_no_model, decode=str, store=InlineObjectStore(), thread=thread)
    return make_engine(OpenAISettings(**{"url": url, "model": "judge", "retries": 2} | settings), parts)


def _no_model() -> None:
    raise AssertionError("nothing is loaded")


def request(**sampling: Any) -> GenerationRequest:
    prompt = np.asarray([1, 2, 3], np.int32)
    return GenerationRequest(
        request_id="r", policy=JUDGE, prompt_ids=prompt, sampling=Sampling(**sampling), seed=(1 << 63) + 5
    )


async def one(engine: Any, asked: GenerationRequest) -> Generation:
    try:
        (generation,) = [generation async for generation in engine.generate([asked])]
        return generation
    finally:
        await engine.close()


def test_it_keeps_the_contract(url: str) -> None:
    async def make() -> Any:
        return engine(url)

    asyncio.run(check_frozen_engine(make, policy=JUDGE, stop_text=lambda ids: text_of(list(ids)), seeded=True))


def test_the_server_is_asked_for_what_the_request_says_and_for_nothing_else(told: Told, url: str) -> None:
    asyncio.run(one(engine(url), request(max_tokens=2, temperature=0.5, top_k=7, stop=("zz",), stop_ids=(300,))))
    asyncio.run(one(engine(url), request(max_tokens=1)))
    first, plain = told.bodies
    expected = {"model": "judge", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0.5, "seed": 5, "top_k": 7}
    expected |= {"stop": ["zz"], "stop_token_ids": [300], "return_token_ids": True, "ignore_eos": True, "logprobs": 0}
    assert {key: first[key] for key in expected} == expected
    assert not {"top_k", "min_p"} & plain.keys()


def test_a_busy_server_is_asked_again(told: Told, url: str) -> None:
    told.statuses = [429, 503]
    got = asyncio.run(one(engine(url), request(max_tokens=3)))
    assert (got.finish, len(told.bodies)) == (FinishReason.LENGTH, 3)
    told.statuses = [503] * 3
    got = asyncio.run(one(engine(url), request(max_tokens=3)))
    assert got.finish is FinishReason.ERROR
    assert "answered 503" in got.error


def test_a_server_without_token_ids_is_told_from_a_bad_prompt(told: Told, url: str) -> None:
    told.speaks_ids = False
    got = asyncio.run(one(engine(url), request(max_tokens=3)))
    assert got.finish is FinishReason.ERROR
    assert "0 token ids and 1 log-probabilities; it must know `return_token_ids`" in got.error


@pytest.mark.parametrize("hangs_up_after", [0, 2])
def test_a_server_that_hangs_up_is_a_lost_engine(told: Told, url: str, hangs_up_after: int) -> None:
    told.hangs_up_after = hangs_up_after
    with pytest.raises(EngineError, match=rf"policies\.judge\.engine\.url: {url} does not answer"):
        asyncio.run(one(engine(url, retries=0), request(max_tokens=3)))


def test_who_leaves_hangs_up_so_that_the_server_may_drop_the_call(told: Told, url: str) -> None:
    async def leave() -> None:
        left = engine(url)
        reader = asyncio.ensure_future(anext(left.generate([request(max_tokens=100_000)])))
        await until(lambda: (read := left._running.get("r")) is not None and len(read[0].ids) > 2)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await until(lambda: told.left == 1)
        assert (await left.usage()).running == 0
        await left.close()

    asyncio.run(leave())


def test_a_call_that_is_aborted_before_it_was_sent_is_answered(url: str) -> None:
    async def act() -> Generation:
        made = engine(url)
        reading = asyncio.ensure_future(one(made, request(max_tokens=50)))
        await asyncio.sleep(0)
        await made.abort(["r"])
        return await reading

    got = asyncio.run(act())
    assert (got.finish, len(got.response_ids)) == (FinishReason.ABORT, 0)


def test_who_leaves_at_a_refused_request_leaves_no_call_behind(told: Told, url: str) -> None:
    async def act() -> None:
        made = engine(url)
        empty = replace(request(), request_id="empty", prompt_ids=np.zeros(0, np.int32))
        answers = made.generate([request(max_tokens=100_000), empty])
        assert (await anext(answers)).finish is FinishReason.ERROR
        await answers.aclose()
        assert (await made.usage()).running == 0
        assert not [
            task for task in asyncio.all_tasks() if task.get_name().startswith("completion") and not task.cancelling()
        ]
        await made.close()

    asyncio.run(act())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - no event tells what a socket has come to
        await asyncio.sleep(0.005)


def probe(engine: Any) -> Coroutine[Any, Any, Any]:
    async def act() -> Any:
        try:
            return await engine.capabilities()
        finally:
            await engine.close()

    return act()


def test_the_first_look_at_a_server_names_what_is_wrong(told: Told, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"policies\.judge\.engine\.model is 'large', which .* serves: judge"):
        asyncio.run(probe(engine(url, model="large")))
    with pytest.raises(EngineError, match="does not answer, after 0 retries"):
        asyncio.run(probe(engine("http://127.0.0.1:9/v1", retries=0)))
    told.key = "sk-right"
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong-secret")
    for call in (lambda one: probe(one), lambda made: one(made, request())):
        with pytest.raises((ConfigError, EngineError), match=r"refused the key in \$JUDGE_KEY") as refused:
            asyncio.run(call(engine(url, key_env="JUDGE_KEY")))
        assert "sk-wrong" not in str(refused.value)
    monkeypatch.setenv("JUDGE_KEY", "sk-right")
    assert not asyncio.run(probe(engine(url, key_env="JUDGE_KEY"))).loads_weights
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"key_env is 'JUDGE_KEY', but that environment variable is not set"):
        engine(url, key_env="JUDGE_KEY")


def test_a_check_of_the_config_asks_the_server_once(url: str) -> None:
    def found(url: str, model: str = "judge") -> list[Finding]:
        engine = f"policies.verifier.engine={{type: openai, url: '{url}', model: {model}}}"
        settings = load_run(MATH_TEAM, [engine, "policies.verifier.trainable=false"])
        return list(examine_servers(settings))

    assert found(url) == [("policies.verifier.engine.url", f"{url} answers, and serves 'judge'", "")]
    with pytest.raises(ConfigError, match=r"policies\.verifier\.engine\.model is 'large'"):
        found(url, "large")
    ((subject, said, todo),) = found("http://127.0.0.1:9/v1")
    assert (subject, todo) == ("policies.verifier.engine.url", "start it before the run")
    assert said.startswith("http://127.0.0.1:9/v1 does not answer")


@pytest.mark.parametrize("url", ["gpu-box:8000", "http://me:secret@gpu-box:8000/v1"])
def test_an_url_that_is_none_or_holds_a_password_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        OpenAISettings(url=url, model="judge")


def test_a_trained_policy_is_refused() -> None:
    engine = "policies.verifier.engine={type: openai, url: http://gpu-box:8000/v1, model: judge}"
    with pytest.raises(ConfigError, match=r"engine\.type is 'openai', which loads no weights, but trainable is true"):
        load_run(MATH_TEAM, [engine])
    settings = load_run(MATH_TEAM, [engine, "policies.verifier.trainable=false"])
    assert settings.policies["verifier"].engine.type == "openai"
