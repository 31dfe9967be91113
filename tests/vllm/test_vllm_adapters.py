"""Adapters of several policies on one vLLM engine: side by side, loaded while requests run, each version by itself."""

import asyncio

import numpy as np
import pytest

from flexmarl.errors import EngineError
from flexmarl.records import FinishReason, Generation, PolicyName, Version
from flexmarl.testing.inference import check_inference_engine
from tests.vllm.conftest import OTHER, POLICY, OneOfMany, ServedAdapters, ask, letters, logprobs_of

PROMPT = list(range(1, 40))


def gap(served: ServedAdapters, policy: PolicyName, generation: Generation) -> float:
    """Largest difference of the log-probabilities to those of merged models, each token at the version of its run."""
    ids, largest = [*PROMPT, *generation.response_ids.tolist()], 0.0
    starts = [run.start for run in generation.versions] + [len(generation.response_ids)]
    for run, end in zip(generation.versions, starts[1:], strict=True):
        theirs = logprobs_of(served.merged[policy, run.version], ids)[len(PROMPT) - 1 :]
        largest = max(largest, float(np.abs(theirs - generation.raw_logprobs)[run.start : end].max()))
    return largest


def test_it_keeps_the_contract_with_adapters(adapted: ServedAdapters) -> None:
    async def make() -> OneOfMany:
        return OneOfMany(adapted.engine)

    async def check() -> None:
        await adapted.load_next_adapter()
        await check_inference_engine(make, policy=POLICY, stop_text=letters, publish_adapter=adapted.publish_adapter)

    adapted.runner.run(check())


def test_two_adapters_in_one_batch_have_the_log_probabilities_of_two_merged_models(adapted: ServedAdapters) -> None:
    async def check() -> None:
        versions = {policy: await adapted.load_next_adapter(policy) for policy in (POLICY, OTHER)}
        answers = await adapted.all(
            [
                ask(f"{policy} {seed}", policy=policy, prompt=PROMPT, seed=seed, max_tokens=48)
                for policy in versions
                for seed in range(4)
            ]
        )
        for answer in answers:
            policy = PolicyName(answer.request_id.split()[0])
            assert [run.version for run in answer.versions] == [versions[policy]]
            assert gap(adapted, policy, answer) < 1e-4
            other = OTHER if policy == POLICY else POLICY
            ids = [*PROMPT, *answer.response_ids.tolist()]
            foreign = logprobs_of(adapted.merged[other, versions[other]], ids)[len(PROMPT) - 1 :]
            assert np.abs(foreign - answer.raw_logprobs).mean() > 0.1, "the adapters must differ"

    adapted.runner.run(check())


def test_a_call_ends_under_the_adapter_with_which_it_began_while_newer_ones_are_loaded(adapted: ServedAdapters) -> None:
    async def check() -> None:
        first = await adapted.load_next_adapter()
        running = asyncio.ensure_future(adapted.all([ask("kept", prompt=PROMPT, max_tokens=200)]))
        await asyncio.sleep(0.05)
        second = await adapted.load_next_adapter()
        assert not running.done(), "the load must have come while the call ran"
        (after,) = await adapted.all([ask("after", prompt=PROMPT, max_tokens=4)])
        (kept,) = await running
        assert [run.version for run in kept.versions] == [first]
        assert [run.version for run in after.versions] == [second]
        assert max(gap(adapted, POLICY, answer) for answer in (kept, after)) < 1e-4

    adapted.runner.run(check())


def test_a_call_of_a_version_that_goes_continues_under_the_newest_and_says_so(adapted: ServedAdapters) -> None:
    async def check() -> None:
        first = await adapted.load_next_adapter()
        await adapted.publish_adapter(501)
        await adapted.publish_adapter(502)
        calls = [
            ask("long", prompt=PROMPT, max_tokens=216),
            ask("foreign", policy=OTHER, prompt=PROMPT, max_tokens=216),
        ]
        other = await adapted.load_next_adapter(OTHER)
        running = asyncio.ensure_future(adapted.all(calls))
        await asyncio.sleep(0.05)
        for version in (501, 502):
            await adapted.engine.load_weights(POLICY, Version(version))
        assert not running.done(), "the loads must have come while the call ran"
        answers = {answer.request_id: answer for answer in await running}
        assert [run.version for run in answers["long"].versions] == [first, 502]
        assert [run.version for run in answers["foreign"].versions] == [other]
        assert answers["long"].finish is FinishReason.LENGTH
        assert len(answers["long"].response_ids) == 216
        assert gap(adapted, POLICY, answers["long"]) < 1e-4
        assert gap(adapted, OTHER, answers["foreign"]) < 1e-4
        assert len(await adapted.engine._llm.list_loras()) <= 4

    adapted.runner.run(check())


def test_a_load_waits_for_no_call_where_every_place_of_an_adapter_is_taken(adapted: ServedAdapters) -> None:
    async def check() -> None:
        running = []
        for policy in (POLICY, OTHER) * 2:
            version = await adapted.load_next_adapter(policy)
            calls = [ask(f"{policy} {version}", policy=policy, prompt=PROMPT, max_tokens=216)]
            running.append(asyncio.ensure_future(adapted.all(calls)))
            await asyncio.sleep(0.1)
        last = await adapted.load_next_adapter()
        assert not any(one.done() for one in running[1:]), "the load must have come while the calls ran"
        ((continued,), *_) = await asyncio.gather(*running)
        assert continued.versions[-1].version == last

    adapted.runner.run(check())


def test_awake_it_serves_what_each_policy_had_and_what_was_published_in_between(adapted: ServedAdapters) -> None:
    async def check() -> None:
        first, other = await adapted.load_next_adapter(), await adapted.load_next_adapter(OTHER)
        calls = [ask(str(policy), policy=policy, prompt=PROMPT, max_tokens=150) for policy in (POLICY, OTHER)]
        running = asyncio.ensure_future(adapted.all(calls))
        await asyncio.sleep(0.3)
        await adapted.engine.sleep()
        second = await adapted.load_next_adapter()
        assert not running.done(), "it must have slept while they ran"
        await adapted.engine.wake()
        answers = {answer.request_id: answer for answer in await running}
        assert [run.version for run in answers[POLICY].versions] == [first, second]
        assert [run.version for run in answers[OTHER].versions] == [other]
        assert all(len(answer.response_ids) == 150 for answer in answers.values())
        assert max(gap(adapted, policy, answers[policy]) for policy in (POLICY, OTHER)) < 1e-4

    adapted.runner.run(check())


def test_a_prefix_is_reused_at_its_own_adapter_and_version_only(adapted: ServedAdapters) -> None:
    async def check() -> None:
        prompt = [n % 90 for n in range(100)]
        for policy in (POLICY, OTHER):
            await adapted.load_next_adapter(policy)
        names = [("one", POLICY), ("two", POLICY), ("three", OTHER)]
        found = [(await adapted.all([ask(n, policy=p, prompt=prompt, max_tokens=2)]))[0] for n, p in names]
        await adapted.load_next_adapter()
        found += await adapted.all([ask("four", prompt=prompt, max_tokens=2)])
        assert [one.reused_tokens for one in found] == [0, 96, 0, 0]

    adapted.runner.run(check())


def test_an_adapter_that_computes_something_else_is_not_served_and_the_old_one_stays(adapted: ServedAdapters) -> None:
    async def check() -> None:
        before = await adapted.load_next_adapter()
        await adapted.publish_adapter(601, canary_of_base=True)
        with pytest.raises(EngineError, match=r"the canary's log-probabilities differ by \d"):
            await adapted.engine.load_weights(POLICY, Version(601))
        (answer,) = await adapted.all([ask("still", prompt=PROMPT, max_tokens=8)])
        assert [run.version for run in answer.versions] == [before]
        assert gap(adapted, POLICY, answer) < 1e-4

    adapted.runner.run(check())


def test_an_adapter_beyond_the_room_and_whole_weights_are_refused(adapted: ServedAdapters) -> None:
    async def check() -> None:
        await adapted.publish_adapter(701, rank=32)
        with pytest.raises(EngineError, match="rank"):
            await adapted.engine.load_weights(POLICY, Version(701))
        await adapted.publish(702)
        with pytest.raises(EngineError, match=r"these are whole weights, .* use engine\.adapters=null"):
            await adapted.engine.load_weights(POLICY, Version(702))
        with pytest.raises(EngineError, match="serves policy 'solver' and 'verifier', not 'judge'"):
            await adapted.engine.load_weights(PolicyName("judge"), Version(1))

    adapted.runner.run(check())
