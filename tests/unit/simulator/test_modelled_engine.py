import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.analysis.costs import EngineCosts, SharedHost
from flexmarl.errors import EngineError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, weights_key
from flexmarl.records import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    PolicyName,
    Sampling,
    Version,
    VersionRun,
)
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_calls import Loads
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import check_inference_engine

SOLVER = PolicyName("solver")
VERIFIER = PolicyName("verifier")
SECOND = EngineCosts(slots=2, decode_s=1.0, decode_request_s=0.0)
"""Two slots, and a token a second."""


def counting(request: GenerationRequest) -> IntArray:
    """Without end: 100 numbers from the seed on."""
    return np.arange(request.seed, request.seed + 100, dtype=np.int32)


def request(
    name: str, tokens: int, *, prompt: int = 1, policy: PolicyName = SOLVER, **more: object
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        policy=policy,
        prompt_ids=np.arange(prompt, dtype=np.int32),
        sampling=Sampling(max_tokens=tokens),
        seed=0,
        **more,  # type: ignore[arg-type]
    )


class Bench:
    """An engine with weights to load, and what it answered when."""

    def __init__(self, costs: EngineCosts = SECOND, **more: object) -> None:
        self.objects = InlineObjectStore()
        self.engine = ModelledEngine(costs, counting, policy=SOLVER, objects=self.objects, **more)  # type: ignore[arg-type]
        self.answers: dict[str, Generation] = {}
        self.at: dict[str, float] = {}

    async def ask(self, *requests: GenerationRequest, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        async for generation in self.engine.generate(requests):
            self.answers[generation.request_id] = generation
            self.at[generation.request_id] = asyncio.get_running_loop().time()

    async def publish(self, version: Version, policy: PolicyName = SOLVER) -> Checksum:
        return (await self.objects.set(weights_key(policy, version), {"weight": torch.ones(1)})).checksum

    def lengths(self) -> dict[str, int]:
        return {name: len(answer.response_ids) for name, answer in self.answers.items()}


async def later(seconds: float, action: object) -> None:
    await asyncio.sleep(seconds)
    done = action()  # type: ignore[operator]
    if asyncio.iscoroutine(done):
        await done


def together(*coroutines: object) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*coroutines)  # type: ignore[call-overload]

    run_virtual(all_of_them())


def test_it_keeps_the_contract_of_every_engine() -> None:
    bench = Bench()

    async def make() -> ModelledEngine:
        return ModelledEngine(EngineCosts(load_s=1.0, call_s=0.5), counting, policy=SOLVER, objects=bench.objects)

    run_virtual(check_inference_engine(make, policy=SOLVER, publish=bench.publish))


def test_requests_beyond_the_slots_wait_their_turn() -> None:
    bench = Bench()
    together(bench.ask(request("a", 3), request("b", 5), request("c", 2), request("d", 1)))
    assert bench.at == {"a": 3.0, "b": 5.0, "c": 5.0, "d": 6.0}


def test_a_request_joins_at_the_next_token_boundary() -> None:
    bench = Bench()
    together(bench.ask(request("a", 3)), bench.ask(request("b", 1), after=1.25), bench.ask(request("c", 1), after=6.25))
    assert bench.at == {"a": 3.0, "b": 3.0, "c": 7.25}


def test_requests_of_the_same_instant_decode_together() -> None:
    bench = Bench()
    together(bench.ask(request("a", 2)), bench.ask(request("b", 2)))
    assert bench.at == {"a": 2.0, "b": 2.0}


def test_a_step_takes_longer_with_each_request_and_each_token_that_is_held() -> None:
    bench = Bench(EngineCosts(decode_s=1.0, decode_request_s=0.1, decode_kv_s=0.01))
    together(bench.ask(request("a", 1, prompt=10), request("b", 2, prompt=20)))
    first = 1.0 + 2 * 0.1 + 30 * 0.01
    assert bench.at == pytest.approx({"a": first, "b": first + 1.0 + 0.1 + 21 * 0.01})


def test_decoding_stands_still_while_a_prompt_is_computed() -> None:
    bench = Bench(SECOND.model_copy(update={"prefill_token_s": 0.5}))
    together(bench.ask(request("a", 4, prompt=2)), bench.ask(request("b", 1, prompt=8), after=2.5))
    assert bench.at == {"a": 9.0, "b": 8.0}


def test_a_prefill_may_count_as_decode_steps() -> None:
    bench = Bench(SECOND.model_copy(update={"prefill_steps": 2.5}))
    together(bench.ask(request("a", 4)))
    assert bench.at == {"a": 7.0}
    assert bench.lengths() == {"a": 4}


def test_what_a_conversation_has_said_is_not_computed_again() -> None:
    bench = Bench(SECOND.model_copy(update={"prefill_token_s": 1.0}))
    first = request("a", 3, prompt=2, conversation="g0e0a0/solver/0")
    longer = np.asarray([0, 1, 0, 1, 2, 7], np.int32)
    second = GenerationRequest(
        request_id="b",
        policy=SOLVER,
        prompt_ids=longer,
        sampling=Sampling(max_tokens=1),
        seed=0,
        conversation="g0e0a0/solver/0",
    )
    together(bench.ask(first), bench.ask(second, after=10.0))
    assert bench.answers["b"].reused_tokens == 4
    assert bench.at == {"a": 5.0, "b": 13.0}


def test_a_prompt_that_another_call_has_is_computed_once() -> None:
    bench = Bench(SECOND.model_copy(update={"prefill_token_s": 1.0}))
    asked = {name: request(name, 3, prompt=4) for name in "abc"}
    together(bench.ask(asked["a"]), bench.ask(asked["b"]), bench.ask(asked["c"], after=20.0))
    assert [bench.answers[name].reused_tokens for name in "abc"] == [0, 3, 0], "nobody has it any more when c comes"
    assert bench.at == {"a": 8.0, "b": 8.0, "c": 27.0}, "five seconds of prompts, three of steps; then four and three"
    alone = Bench(SECOND.model_copy(update={"prefill_token_s": 1.0, "kept_prefixes": 0}))
    together(alone.ask(request("a", 3, prompt=4)), alone.ask(request("b", 3, prompt=4)))
    assert alone.at == {"a": 11.0, "b": 11.0}


def test_the_way_takes_time_too() -> None:
    bench = Bench(SECOND.model_copy(update={"call_s": 0.5}))
    together(bench.ask(request("a", 2), request("b", 1)), later(0.25, lambda: bench.engine.abort(["b"])))
    assert bench.at == {"b": 0.25, "a": 2.5}


def test_an_aborted_request_ends_at_the_next_token_boundary_and_frees_its_slot() -> None:
    bench = Bench()
    together(
        bench.ask(request("a", 9), request("b", 9), request("c", 1), request("d", 1)),
        later(2.5, lambda: bench.engine.abort(["a", "d"])),
    )
    assert bench.at == {"d": 2.5, "a": 3.0, "c": 4.0, "b": 9.0}
    assert bench.lengths() == {"d": 0, "a": 3, "c": 1, "b": 9}
    assert bench.answers["a"].finish is bench.answers["d"].finish is FinishReason.ABORT


def test_a_load_in_the_midst_of_a_reply_is_recorded_at_the_token_boundary() -> None:
    bench = Bench(SECOND.model_copy(update={"load_s": 2.0}))

    async def load() -> None:
        expected = await bench.publish(Version(1))
        await asyncio.sleep(0.5)
        assert await bench.engine.load_weights(SOLVER, Version(1)) == expected
        assert asyncio.get_running_loop().time() == 2.5

    together(bench.ask(request("a", 5), request("b", 3)), load(), bench.ask(request("c", 1), after=6.0))
    assert bench.answers["a"].versions == (VersionRun(0, Version(0)), VersionRun(3, Version(1)))
    assert bench.answers["b"].versions == (VersionRun(0, Version(0)),)
    assert bench.answers["c"].versions == (VersionRun(0, Version(1)),)


def test_an_engine_that_is_moved_serves_the_other_policy_at_its_costs() -> None:
    bench = Bench(costs_of=lambda policy: EngineCosts(move_s=3.0, decode_s=2.0, decode_request_s=0.0))

    async def move() -> None:
        await bench.publish(Version(4), VERIFIER)
        await bench.engine.load_weights(VERIFIER, Version(4))

    together(
        bench.ask(request("a", 9)),
        move(),
        bench.ask(request("b", 1, policy=VERIFIER), after=1.0),
        bench.ask(request("c", 2, policy=VERIFIER), after=4.0),
    )
    assert bench.answers["a"].finish is FinishReason.ABORT
    assert bench.at == {"b": 1.0, "a": 3.0, "c": 8.0}
    assert bench.answers["b"].error == "this engine serves policy 'solver', not 'verifier'"
    assert bench.answers["c"].versions == (VersionRun(0, Version(4)),)


def test_an_engine_that_sleeps_stands_still() -> None:
    bench = Bench(SECOND.model_copy(update={"sleep_s": 0.5, "wake_s": 0.25}))
    together(
        bench.ask(request("a", 3)),
        bench.ask(request("b", 1), after=2.5),
        later(2.0, lambda: bench.engine.sleep()),
        later(9.75, lambda: bench.engine.wake()),
    )
    assert bench.at == {"a": 11.0, "b": 11.0}
    assert bench.engine.busy_s == 3.0


def test_an_engine_that_sleeps_hears_an_abort() -> None:
    bench = Bench()
    together(
        bench.ask(request("a", 9), request("b", 9), request("c", 9)),
        later(2.0, lambda: bench.engine.sleep()),
        later(5.0, lambda: bench.engine.abort(["a", "c"])),
        later(8.0, lambda: bench.engine.wake()),
    )
    assert bench.at == {"c": 5.0, "a": 5.0, "b": 15.0}
    assert bench.lengths() == {"c": 0, "a": 2, "b": 9}


def test_a_request_that_another_instance_began_is_finished_with_what_it_would_have_said() -> None:
    bench = Bench()
    whole = GenerationRequest(
        request_id="a", policy=SOLVER, prompt_ids=np.zeros(4, np.int32), sampling=Sampling(max_tokens=7), seed=30
    )
    begun = GenerationRequest(
        request_id="b",
        policy=SOLVER,
        prompt_ids=np.zeros(7, np.int32),
        sampling=Sampling(max_tokens=4),
        seed=30,
        offset=3,
    )
    together(bench.ask(whole, begun))
    assert bench.answers["b"].response_ids.tolist() == bench.answers["a"].response_ids[3:].tolist()


def test_busy_trainers_slow_an_engine_down_from_the_next_token_boundary_on() -> None:
    host = CpuShare(SharedHost(engine_per_trainer=1.0))
    bench = Bench(host=host)

    async def train() -> None:
        await asyncio.sleep(1.5)
        with host.busy_trainer():
            await asyncio.sleep(2.0)

    together(bench.ask(request("a", 5)), train())
    assert bench.at == {"a": 1.0 + 1.0 + 2.0 + 1.0 + 1.0}


def test_busy_engines_slow_one_another_down() -> None:
    host = CpuShare(SharedHost(engine_per_engine=1.0))
    one, other = Bench(host=host), Bench(host=host)
    together(one.ask(request("a", 3)), other.ask(request("b", 1)))
    assert (one.at, other.at) == ({"a": 4.0}, {"b": 2.0})
    assert host.engine_factor() == 1.0


def test_a_slow_engine_is_slow() -> None:
    bench = Bench()
    together(bench.ask(request("a", 3)), later(1.0, lambda: bench.engine.slow(4.0)))
    assert bench.at == {"a": 9.0}


def test_a_lost_engine_raises_in_every_call() -> None:
    bench = Bench()

    async def ask(after: float) -> None:
        with pytest.raises(EngineError, match="the node caught fire"):
            await bench.ask(request("a", 9), after=after)

    together(ask(0.0), ask(3.0), later(1.5, lambda: bench.engine.fail("the node caught fire")))
    assert bench.answers == {}
    assert bench.engine.busy_s == 1.5


def test_a_responder_that_fails_fails_its_request_alone() -> None:
    def respond(request: GenerationRequest) -> IntArray:
        if request.request_id == "bad":
            raise EngineError("out of words")
        return counting(request)

    engine = ModelledEngine(SECOND, respond, policy=SOLVER)

    async def ask() -> dict[str, Generation]:
        return {answer.request_id: answer async for answer in engine.generate([request("bad", 1), request("good", 1)])}

    answers = run_virtual(ask())
    assert (answers["bad"].finish, answers["bad"].error) == (FinishReason.ERROR, "out of words")
    assert answers["good"].finish is FinishReason.LENGTH


def test_usage_counts_what_is_left() -> None:
    bench = Bench()

    async def look() -> None:
        await asyncio.sleep(2.0)
        use = await bench.engine.usage()
        assert (use.running, use.queued, use.queued_tokens, use.generated_tokens) == (2, 1, 3 + 4 + 7, 4)

    together(bench.ask(request("a", 5), request("b", 6), request("c", 7)), look())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 4))
def test_it_is_busy_exactly_while_a_request_is_there(arrivals: Sequence[tuple[int, int]], slots: int) -> None:
    bench = Bench(SECOND.model_copy(update={"slots": slots}))
    together(*(bench.ask(request(f"r{i}", n), after=float(at)) for i, (at, n) in enumerate(arrivals)))
    ends = bench.at
    covered = {second for i, (at, _) in enumerate(arrivals) for second in range(at, int(ends[f"r{i}"]))}
    assert bench.engine.busy_s == len(covered)
    assert bench.engine.answered_tokens == sum(n for _, n in arrivals)


def test_the_same_requests_get_the_same_answers_at_the_same_instants() -> None:
    def play() -> list[tuple[str, float, list[int]]]:
        rng = random.Random(7)
        bench = Bench(EngineCosts(slots=5, decode_kv_s=1e-5, prefill_token_s=1e-4))
        asked = [
            bench.ask(request(f"r{i}", rng.randint(1, 60), prompt=rng.randint(1, 50)), after=rng.random())
            for i in range(40)
        ]
        together(*asked)
        return [(name, bench.at[name], answer.response_ids.tolist()) for name, answer in bench.answers.items()]

    assert play() == play()


def test_of_versions_loaded_within_one_step_only_the_last_one_samples() -> None:
    loads = Loads(Version(1))
    loads.add(5, Version(2))
    loads.add(5, Version(3))
    assert loads.runs(first=0.0, num_tokens=9) == (VersionRun(0, Version(1)), VersionRun(5, Version(3)))
