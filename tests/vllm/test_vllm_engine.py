"""The vLLM engine: the contract, log-probabilities against transformers, and weights that change under requests."""

import asyncio
import random
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.backends.vllm.engine_args import _arguments, vllm_config
from flexmarl.inference.calls import joined
from flexmarl.inference.interface import EngineParts
from flexmarl.inference.settings import VllmSettings
from flexmarl.objects.interface import canary_key, weights_key
from flexmarl.records import FinishReason, Generation, PolicyName, Version
from flexmarl.testing.inference import check_inference_engine
from tests.vllm.conftest import (
    OTHER,
    POLICY,
    SETTINGS,
    SIZE,
    OneOfMany,
    Served,
    ask,
    letters,
    logprobs_of,
    running,
)


def gap(served: Served, prompt: list[int], generation: Generation) -> float:
    """Largest difference of the log-probabilities to transformers', each token at the version of its run."""
    ids, found = [*prompt, *generation.response_ids.tolist()], generation.raw_logprobs
    theirs = {run.version: logprobs_of(served.models[run.version], ids) for run in generation.versions}
    ends = [run.start for run in generation.versions[1:]] + [len(found)]
    expected = np.concatenate(
        [
            theirs[run.version][len(prompt) - 1 + run.start : len(prompt) - 1 + end]
            for run, end in zip(generation.versions, ends, strict=True)
        ]
    )
    return float(np.abs(expected - found).max())


@pytest.mark.core
def test_it_keeps_the_contract(served: Served) -> None:
    """One engine serves all clauses but the end of the engine itself, as a start takes a minute."""

    async def make() -> OneOfMany:
        return OneOfMany(served.engine)

    async def check() -> None:
        await check_inference_engine(make, policy=POLICY, stop_text=letters, publish=served.publish)

    served.runner.run(check())


@pytest.mark.core
def test_more_prompt_tokens_at_once_than_vllm_computes_in_a_step_are_all_answered(served: Served) -> None:
    """vLLM 0.32 on a CPU fails if it computes a prompt in chunks and its request has a seed, as ours have."""

    async def check() -> None:
        rng = np.random.default_rng(0)
        requests = [
            ask(f"long{n}", prompt=rng.integers(1, SIZE, 150).tolist(), seed=n, max_tokens=8) for n in range(32)
        ]
        assert sum(len(one.prompt_ids) for one in requests) > 2 * 2048
        together = {one.request_id: one.response_ids.tolist() for one in await served.all(requests)}
        assert {len(ids) for ids in together.values()} == {8}
        (alone,) = await served.all([replace(requests[-1], request_id="alone")])
        assert alone.response_ids.tolist() == together["long31"]

    served.runner.run(check())


@pytest.mark.core
def test_log_probabilities_are_those_of_the_model_before_and_after_an_update(served: Served) -> None:
    async def check() -> None:
        prompt = list(range(1, 40))
        for update in (False, True):
            if update:
                await served.load_next()
            for generation in await served.all(
                [ask(f"r{seed}", prompt=prompt, seed=seed, max_tokens=48) for seed in range(4)]
            ):
                assert len(generation.response_ids) == 48
                assert gap(served, prompt, generation) < 1e-4

    served.runner.run(check())


def test_an_update_of_tied_weights_changes_greedy_output_and_is_proved_by_the_digest(served: Served) -> None:
    async def check() -> None:
        (before,) = await served.all([ask("before", max_tokens=24, temperature=0.0)])
        await served.load_next()  # compares the digest of the workers with that of the object store
        (after,) = await served.all([ask("after", max_tokens=24, temperature=0.0)])
        assert before.response_ids.tolist() != after.response_ids.tolist()
        assert gap(served, [1, 2, 3], after) < 1e-4

    served.runner.run(check())


def test_a_prefix_is_reused_at_its_own_version_only(served: Served) -> None:
    async def check() -> None:
        prompt = [n % SIZE for n in range(100)]
        first, second = [(await served.all([ask(name, prompt=prompt, max_tokens=2)]))[0] for name in ("one", "two")]
        await served.load_next()
        (third,) = await served.all([ask("three", prompt=prompt, max_tokens=2)])
        assert (first.reused_tokens, second.reused_tokens, third.reused_tokens) == (0, 96, 0)
        assert gap(served, prompt, third) < 1e-4

    served.runner.run(check())


def test_version_runs_are_exact_under_fifty_updates_at_random_moments(served: Served) -> None:
    async def check() -> None:
        dice, answers, updates = random.Random(7), list[Generation](), 0
        asked = 0

        async def keep_asking() -> None:
            nonlocal asked
            while updates < 50:
                asked += 1
                answers.extend(await served.all([ask(f"q{asked}-{n}", seed=n, max_tokens=200) for n in range(2)]))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_asking())
            while updates < 50:
                await asyncio.sleep(dice.uniform(0, 0.2))
                await served.load_next()
                updates += 1
        crossed = [answer for answer in answers if len(answer.versions) > 1]
        assert sum(len(answer.versions) for answer in crossed) > 25, "updates must have come while requests ran"
        assert all(len(answer.response_ids) == 200 and answer.finish is FinishReason.LENGTH for answer in answers)
        assert max(gap(served, [1, 2, 3], answer) for answer in crossed) < 1e-3

    served.runner.run(check())


def test_what_is_told_while_it_is_sampled_is_the_beginning_of_the_answer_also_across_updates(served: Served) -> None:
    async def check() -> None:
        parts, answers = list[Generation](), dict[str, Generation]()

        async def load() -> None:
            await served.load_next()

        asked = [replace(ask("told", max_tokens=120), streams=True), ask("silent", max_tokens=120)]
        async with asyncio.TaskGroup() as tasks:
            async for one in served.engine.generate(asked):
                if isinstance(one, Generation):
                    answers[one.request_id] = one
                    continue
                assert one.request_id == "told" not in answers
                parts.append(one.part)
                if len(parts) in (10, 40):
                    tasks.create_task(load())
        told, whole = reduce(joined, parts), answers["told"]
        size = len(told.response_ids)
        assert len(parts) > 40, "step by step"
        assert 0 < size < len(whole.response_ids) == 120
        assert told.response_ids.tolist() == whole.response_ids[:size].tolist()
        assert told.logprobs.tolist() == whole.logprobs[:size].tolist()
        assert told.versions == tuple(run for run in whole.versions if run.start < size)
        assert len(told.versions) == 3, "witness: both updates came in between"

    served.runner.run(check())


def test_a_stop_string_is_found_across_an_update(served: Served) -> None:
    async def check() -> None:
        (free,) = await served.all([ask("free", max_tokens=5, seed=3)])
        begun = [1, 2, 3, *free.response_ids.tolist()]
        (next_token,) = await served.all([ask("next", prompt=begun, max_tokens=1, temperature=0.0)])
        stop = letters([begun[-1], *next_token.response_ids.tolist()])
        assert stop not in letters(begun)
        rest = replace(ask("rest", prompt=begun, max_tokens=9, temperature=0.0, stop=(stop,)), offset=5)
        (rest,) = await served.all([rest])
        assert rest.response_ids.tolist() == next_token.response_ids.tolist()
        assert rest.finish is FinishReason.STOP

    served.runner.run(check())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"options": {"blok_size": 32}}, "options.blok_size: vLLM has no such argument; did you mean 'block_size'"),
        ({"options": {"block_size": "many"}}, "vLLM refuses it, with options {'block_size': 'many'}"),
        (
            {"options": {"enable_chunked_prefill": True}},
            "options.enable_chunked_prefill is True, but on a CPU vLLM fails",
        ),
        ({"tensor_parallel": 2}, "tensor_parallel is 2, but the engine is on a CPU"),
    ],
)
def test_what_vllm_refuses_is_named(served: Served, settings: dict[str, object], named: str) -> None:
    parts: EngineParts = served.engine._parts
    with pytest.raises(ConfigError) as refused:
        vllm_config(VllmSettings.model_validate(settings), parts)
    assert named in str(refused.value)
    assert f"policies.{POLICY}.engine" in str(refused.value)


@pytest.mark.parametrize("kv_gib", [1.0, None])
def test_vllm_asks_for_no_more_of_an_accelerator_than_the_keys_and_values_that_are_set(
    served: Served, kv_gib: float | None
) -> None:
    """Its arguments alone: without an accelerator vLLM refuses them."""

    def share(**options: float) -> float | None:
        settings = VllmSettings(kv_gib=kv_gib, options=options)
        return _arguments(settings, served.engine._parts, on_cpu=False).get("gpu_memory_utilization")

    assert share() == (None if kv_gib is None else 0.01)
    assert share(gpu_memory_utilization=0.3) == 0.3


def test_an_engine_becomes_another_policys_by_its_weights_when_its_calls_have_ended(tmp_path: Path) -> None:
    def other(policy: PolicyName) -> tuple[VllmSettings, EngineParts]:
        settings = SETTINGS if policy == OTHER else SETTINGS.model_copy(update={"slots": 7})
        return settings, EngineParts(**{**shared, "policy": policy})

    async def check() -> None:
        await served.publish(3)
        for key in (weights_key, canary_key):
            await served.store.set(key(OTHER, Version(3)), await served.store.get(key(POLICY, Version(3))))
        under_way = asyncio.ensure_future(served.all([ask("one", max_tokens=200)]))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="has requests of 'solver'; they must end first"):
            await engine.load_weights(OTHER, Version(3))
        await under_way
        with pytest.raises(EngineError, match="serves policy 'solver', not 'judge'"):
            await engine.load_weights(PolicyName("judge"), Version(3))
        assert (await served.all([ask("two", max_tokens=1)]))[0].versions[0].version == 0
        await engine.load_weights(OTHER, Version(3))
        prompt = [1, 2, 3, 4]
        (answer,) = await served.all([ask("three", policy=OTHER, prompt=prompt, max_tokens=20)])
        assert gap(served, prompt, answer) < 1e-4
        assert [run.version for run in answer.versions] == [3]
        (refused,) = await served.all([ask("four", max_tokens=1)])
        assert "serves policy 'verifier', not 'solver'" in refused.error

    shared: dict[str, Any] = {}
    for runner, engine, store in running(tmp_path, SETTINGS, other=other):
        served = Served(runner, engine, store)
        shared |= {field.name: getattr(engine._parts, field.name) for field in fields(EngineParts)}
        runner.run(check())


def test_weights_whose_canary_differs_cost_the_engine(doomed: Served) -> None:
    async def check() -> None:
        running = asyncio.ensure_future(doomed.all([ask("long", max_tokens=250)]))
        await doomed.publish(1, canary_of=2)
        with pytest.raises(EngineError, match=r"the canary's log-probabilities differ by \d"):
            await doomed.engine.load_weights(POLICY, Version(1))
        for use in (running, doomed.all([ask("later", max_tokens=1)]), doomed.engine.load_weights(POLICY, Version(1))):
            with pytest.raises(EngineError, match="is lost: loading 'weights/solver/1' failed half-way"):
                await use

    doomed.runner.run(check())
