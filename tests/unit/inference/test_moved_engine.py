"""An embedded engine that becomes another policy's: it samples what that policy's own engine would, or says why not."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import EngineError
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine, make_engine
from flexmarl.inference.interface import EngineParts
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import PublishedAdapter, checksum, weights_key
from flexmarl.records import FinishReason, Generation, PolicyName, Version
from tests.unit.inference import models as tiny

SOLVER, WRITER = PolicyName("solver"), PolicyName("writer")
FIRST = Version(1)


@dataclass
class Policies:
    """Two policies' models and settings, and engines of each in one process."""

    models: Mapping[PolicyName, Callable[[], PreTrainedModel]]
    settings: Mapping[PolicyName, EmbeddedSettings] = field(
        default_factory=lambda: dict.fromkeys((SOLVER, WRITER), tiny.settings())
    )
    same: bool = True
    """True if their models have one architecture."""
    decode: Mapping[PolicyName, Callable[[Sequence[int]], str]] = field(
        default_factory=lambda: dict.fromkeys((SOLVER, WRITER), tiny.letters)
    )
    made: list[PolicyName] = field(default_factory=list)
    """Policies whose model was made, in order."""
    store: InlineObjectStore = field(default_factory=InlineObjectStore)
    thread: DeviceThread = field(default_factory=DeviceThread)

    def engine(self, policy: PolicyName) -> EmbeddedEngine:
        return make_engine(*self._engine_of(policy))

    async def publish(self, policy: PolicyName, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        weights = self.models[policy]().named_parameters()
        tree = {name: weight.detach() + 0.1 * torch.randn(weight.shape, generator=noise) for name, weight in weights}
        await self.store.set(weights_key(policy, FIRST), tree)

    async def answers(self, engine: EmbeddedEngine, policy: PolicyName) -> list[Generation]:
        requests = [replace(tiny.request(n, [1, 2, n], seed=n, stop=("zz",)), policy=policy) for n in range(1, 4)]
        found = {generation.request_id: generation async for generation in engine.generate(requests)}
        return [found[request.request_id] for request in requests]

    def _engine_of(self, policy: PolicyName) -> tuple[EmbeddedSettings, EngineParts]:
        def make_model() -> PreTrainedModel:
            self.made.append(policy)
            return self.models[policy]()

        return self.settings[policy], EngineParts(
            policy=policy,
            make_model=make_model,
            decode=self.decode[policy],
            store=self.store,
            thread=self.thread,
            architecture="one" if self.same else policy,
            other=self._engine_of,
        )


def compared(policies: Policies, made: list[PolicyName]) -> None:
    """A moved engine answers as the policy's own one, also after it has moved back."""

    async def scenario() -> None:
        await policies.publish(SOLVER, 1)
        await policies.publish(WRITER, 2)
        own = {policy: policies.engine(policy) for policy in (SOLVER, WRITER)}
        for policy, engine in own.items():
            await engine.load_weights(policy, FIRST)
        expected = {policy: await policies.answers(engine, policy) for policy, engine in own.items()}
        assert expected[SOLVER][0].response_ids.tolist() != expected[WRITER][0].response_ids.tolist(), "witness"
        policies.made.clear()
        moving = own[SOLVER]
        for policy in (WRITER, SOLVER, WRITER):
            held = await moving.load_weights(policy, FIRST)
            assert held == checksum(await policies.store.get(weights_key(policy, FIRST)))
            for answer, right in zip(await policies.answers(moving, policy), expected[policy], strict=True):
                assert answer.response_ids.tolist() == right.response_ids.tolist()
                assert answer.logprobs.tolist() == right.logprobs.tolist()
                assert (answer.versions, answer.finish) == (right.versions, right.finish)
        assert policies.made == made
        await moving.close()

    asyncio.run(scenario())
    policies.thread.close()


def test_a_policy_of_the_same_architecture_gets_its_weights_swapped_in() -> None:
    compared(Policies({SOLVER: tiny.qwen3, WRITER: lambda: tiny.qwen3(1)}), made=[])


def test_a_policy_of_another_architecture_gets_a_model_of_its_own() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.llama}, same=False)
    compared(policies, made=[WRITER, SOLVER, WRITER])


def test_a_model_of_the_same_shapes_that_computes_otherwise_is_made_anew() -> None:
    def slow_rope() -> PreTrainedModel:
        torch.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(
                **tiny.SHAPE, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
            )
        ).eval()

    compared(Policies({SOLVER: tiny.qwen3, WRITER: slow_rope}, same=False), made=[WRITER, SOLVER, WRITER])


def test_stop_strings_are_read_with_the_tokenizer_of_the_policy() -> None:
    decode = {SOLVER: tiny.letters, WRITER: lambda ids: "z" * len(ids)}
    compared(Policies({SOLVER: tiny.qwen3, WRITER: lambda: tiny.qwen3(1)}, decode=decode), made=[])


def test_a_policy_with_other_engine_settings_gets_an_engine_of_its_own() -> None:
    settings = {SOLVER: tiny.settings(), WRITER: tiny.settings(slots=2, max_len=48)}
    compared(Policies({SOLVER: tiny.qwen3, WRITER: tiny.qwen3}, settings), made=[WRITER, SOLVER, WRITER])


def test_an_adapter_on_a_base_that_was_overwritten_gets_its_base_anew() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.qwen3})

    async def scenario() -> None:
        await policies.publish(SOLVER, 1)
        base = tiny.qwen3()
        linear = base.get_submodule("model.layers.0.self_attn.q_proj")
        assert isinstance(linear, torch.nn.Linear)
        torch.manual_seed(5)
        a, b = torch.randn(2, linear.in_features), torch.randn(linear.out_features, 2)
        layers = {"model.layers.0.self_attn.q_proj": (a, b)}
        untied = dict(base.named_parameters())
        adapter = PublishedAdapter(layers, 0.5, checksum(untied))
        await policies.store.set(weights_key(WRITER, FIRST), adapter.as_tree())
        own, moving = policies.engine(WRITER), policies.engine(SOLVER)
        await own.load_weights(WRITER, FIRST)
        await moving.load_weights(SOLVER, FIRST)
        policies.made.clear()
        await moving.load_weights(WRITER, FIRST)
        assert policies.made == [WRITER]
        expected = [answer.response_ids.tolist() for answer in await policies.answers(own, WRITER)]
        assert [answer.response_ids.tolist() for answer in await policies.answers(moving, WRITER)] == expected

    asyncio.run(scenario())
    policies.thread.close()


def test_with_requests_it_stays_what_it_is() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.qwen3})

    async def scenario() -> None:
        await policies.publish(WRITER, 2)
        engine = policies.engine(SOLVER)
        stream = engine.generate([tiny.request("long", max_tokens=80)])
        answer = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="this engine has requests of 'solver'; they must end first"):
            await engine.load_weights(WRITER, FIRST)
        assert (await answer).finish in (FinishReason.LENGTH, FinishReason.STOP)
        await engine.close()

    asyncio.run(scenario())
    policies.thread.close()


def test_requests_whose_callers_have_left_do_not_hinder_it_and_stray_aborts_do_no_harm() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.llama}, same=False)

    async def scenario() -> None:
        await policies.publish(WRITER, 2)
        engine = policies.engine(SOLVER)
        stream = engine.generate([tiny.request("left", max_tokens=80)])
        answer = asyncio.ensure_future(anext(stream))
        while not (await engine.usage()).running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        answer.cancel()
        await asyncio.wait([answer])
        becoming = asyncio.ensure_future(engine.load_weights(WRITER, FIRST))
        early: asyncio.Future[list[Generation]] | None = None
        while not becoming.done():
            await engine.abort(["left", "never seen"])
            await asyncio.sleep(0.001)
            if early is None and engine._core is None:
                early = asyncio.ensure_future(policies.answers(engine, WRITER))
        await becoming
        assert early is not None, "witness: requests came while it had no model"
        assert [answer.finish for answer in await early] == [FinishReason.LENGTH] * 3
        refused = [generation async for generation in engine.generate([tiny.request("late")])]
        assert refused[0].finish == FinishReason.ERROR, "it serves the solver no more"
        await engine.close()

    asyncio.run(scenario())
    policies.thread.close()


def test_an_abort_that_comes_as_the_last_pass_ends_is_waited_for_too() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.llama}, same=False)

    async def scenario() -> None:
        await policies.publish(WRITER, 2)
        engine = policies.engine(SOLVER)
        last = asyncio.ensure_future(anext(engine.generate([tiny.request("left", max_tokens=80)])))
        while not (await engine.usage()).running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        last.cancel()
        await asyncio.wait([last])
        found: list[asyncio.Task[None]] = []

        async def abort() -> None:
            await engine.abort(["never seen"])
            found.append(pump())

        def pump() -> asyncio.Task[None]:
            assert engine._pump_task is not None
            return engine._pump_task

        pump().add_done_callback(lambda _: asyncio.ensure_future(abort()))
        await engine.load_weights(WRITER, FIRST)
        assert found, "the witness"
        assert found[0].done()
        assert found[0].exception() is None
        await engine.close()

    asyncio.run(scenario())
    policies.thread.close()


def test_an_engine_that_cannot_become_it_is_lost_and_says_so() -> None:
    def broken() -> PreTrainedModel:
        raise RuntimeError("no room on the device")

    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.qwen3}, same=False)

    async def scenario() -> None:
        await policies.publish(WRITER, 2)
        engine = policies.engine(SOLVER)
        policies.models = {SOLVER: tiny.qwen3, WRITER: broken}
        with pytest.raises(EngineError, match="no room on the device"):
            await engine.load_weights(WRITER, FIRST)
        with pytest.raises(EngineError, match="the engine of 'writer' was not made: it has no model any more"):
            _ = [generation async for generation in engine.generate([tiny.request("late")])]
        await engine.close()

    asyncio.run(scenario())
    policies.thread.close()


def test_without_other_policies_it_serves_its_own_alone() -> None:
    policies = Policies({SOLVER: tiny.qwen3, WRITER: tiny.qwen3})

    async def scenario() -> None:
        settings, parts = policies._engine_of(SOLVER)
        engine = make_engine(settings, replace(parts, other=None))
        with pytest.raises(EngineError, match="this engine serves policy 'solver', not 'writer'"):
            await engine.load_weights(WRITER, FIRST)

    asyncio.run(scenario())
    policies.thread.close()
