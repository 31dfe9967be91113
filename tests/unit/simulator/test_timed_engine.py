"""Engines that answer after their modelled time, on the real clock: the contract, the model of each policy, weights."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError

from flexmarl.agents import ChatRenderer
from flexmarl.analysis.costs import EngineCosts
from flexmarl.assemble.needed_memory import parts, size_of
from flexmarl.assemble.wire import slots_of
from flexmarl.cli.needs import examine_machine
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.config import load_run
from flexmarl.errors import EngineError
from flexmarl.events.machine import this_machine
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.settings import ENGINES, computes
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, checksum, names_checksum, weights_key
from flexmarl.records import GenerationRequest, IntArray, PolicyName, Sampling, Version
from flexmarl.simulator.replies import responder
from flexmarl.simulator.settings import EngineModel
from flexmarl.simulator.timed_engine import ScriptedSettings, TimedEngine, TimedSettings
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import check_inference_engine
from flexmarl.training.backends.causal_lm import load_model
from tests.unit.agents.tokenizers_for_tests import byte_pairs

SOLVER, WRITER = PolicyName("solver"), PolicyName("writer")
QUICK = EngineCosts(decode_s=2e-3, decode_request_s=1e-5, load_s=1e-3, move_s=1e-3)
WEIGHTS = {"weight": torch.arange(6.0)}


def counting(request: GenerationRequest) -> IntArray:
    """100 numbers from the seed on."""
    return np.arange(request.seed, request.seed + 100, dtype=np.int32)


def ones(request: GenerationRequest) -> IntArray:
    return np.ones(3, np.int32)


OTHER = EngineCosts(slots=3, decode_s=1e-4, move_s=0.0)
MODELS = {SOLVER: EngineModel(QUICK, counting), WRITER: EngineModel(OTHER, ones)}


def engine(store: InlineObjectStore, **more: object) -> TimedEngine:
    parts = EngineParts(
        policy=SOLVER,
        make_model=lambda: pytest.fail("it computes nothing"),
        decode=lambda ids: "",
        store=store,
        thread=DeviceThread(),
        modelled=MODELS.__getitem__,
        **more,  # type: ignore[arg-type]
    )
    made = make_engine(TimedSettings(), parts)
    assert isinstance(made, TimedEngine)
    return made


def request(policy: PolicyName, tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        policy=policy,
        prompt_ids=np.ones(1, np.int32),
        sampling=Sampling(max_tokens=tokens),
        seed=7,
    )


def test_it_keeps_the_contract_of_every_engine_on_the_real_clock() -> None:
    store = InlineObjectStore()

    async def make() -> TimedEngine:
        return engine(store)

    async def publish(version: Version) -> Checksum:
        return (await store.set(weights_key(SOLVER, version), WEIGHTS)).checksum

    asyncio.run(check_inference_engine(make, policy=SOLVER, publish=publish))


def test_it_is_an_engine_of_the_table_that_computes_nothing_and_takes_no_adapter_alone() -> None:
    assert ENGINES["timed"] is TimedSettings
    assert not computes(TimedSettings())
    assert computes(ENGINES["embedded"]())  # type: ignore[call-arg]
    assert not asyncio.run(engine(InlineObjectStore()).capabilities()).adapters


@pytest.mark.parametrize(("verify", "of"), [("full", checksum), ("names", names_checksum)])
def test_the_checksum_of_a_load_is_that_of_the_bytes_it_read(verify: str, of: Callable[[object], Checksum]) -> None:
    async def load() -> Checksum:
        store = InlineObjectStore()
        await store.set(weights_key(SOLVER, Version(1)), WEIGHTS)
        return await engine(store, verify=verify).load_weights(SOLVER, Version(1))

    assert asyncio.run(load()) == of(WEIGHTS)


def test_after_a_move_it_answers_by_the_other_policys_replies_and_costs() -> None:
    async def moved() -> tuple[list[int], EngineCosts]:
        store = InlineObjectStore()
        await store.set(weights_key(WRITER, Version(1)), WEIGHTS)
        own = engine(store)
        await own.load_weights(WRITER, Version(1))
        (answer,) = [generation async for generation in own.generate([request(WRITER)])]
        return answer.response_ids.tolist(), own.costs

    assert asyncio.run(moved()) == ([1, 1, 1], MODELS[WRITER].costs)


def test_a_load_that_fails_keeps_the_old_weights_and_names_the_object() -> None:
    own = engine(InlineObjectStore())
    with pytest.raises(EngineError, match="weights/solver/9"):
        asyncio.run(own.load_weights(SOLVER, Version(9)))
    assert own.version == Version(0)


def test_answers_take_their_modelled_time() -> None:
    async def ask() -> float:
        own = engine(InlineObjectStore())
        began = asyncio.get_running_loop().time()
        assert [generation async for generation in own.generate([request(SOLVER, tokens=50)])]
        return asyncio.get_running_loop().time() - began

    assert run_virtual(ask()) == pytest.approx(50 * (QUICK.decode_s + QUICK.decode_request_s))


def test_a_timed_policy_has_the_slots_of_its_costs_and_takes_no_process(small_run: Path) -> None:
    timed = ["policies.one.engine={type: timed}", "policies.one.instances=30", "cluster.backend=ray"]
    settings = load_run(
        small_run,
        [
            *timed,
            "simulation.costs.default={origin: a test, engine: {slots: 5}}",
            "simulation.replies.default={type: lengths, mean: 9}",
        ],
    )
    assert slots_of(settings, PolicyName("one")) == 5
    (processes,) = [
        one.found for one in examine_machine(settings, {}, this_machine(), {}) if one.subject == "processes"
    ]
    assert processes.startswith("0 engines and 1 trainers, on cpu, and 30 engines in the controller's process")
    sizes = {"one": size_of(load_model(small_run.parent / "model"), settings.policies["one"])}
    (libraries,) = [part for part in parts(settings, sizes) if part.name == "libraries"]
    assert libraries.num_bytes < 3 * psutil.Process().memory_info().rss, "of two processes: controller and trainer"


@responder("says_seven_often")
def says_seven_often(prompt: str, rng: random.Random) -> str:
    return f"{prompt} The answer is seven. " * 3


def spelled(
    renderer: ChatRenderer, *, scramble: bool = False, reads: int | None = None, **sampling: Any
) -> list[list[int]]:
    """Ids of the engine's answers to six seeds."""
    parts = EngineParts(
        policy=SOLVER,
        make_model=lambda: pytest.fail("it computes nothing"),
        decode=renderer.decode,
        renderer=renderer,
        store=InlineObjectStore(),
        thread=DeviceThread(),
    )
    asked = [
        GenerationRequest(
            request_id=str(seed),
            policy=SOLVER,
            prompt_ids=np.asarray(renderer.encode("Why?"), np.int32),
            sampling=Sampling(max_tokens=200, stop_ids=renderer.stop_ids, **sampling),
            seed=seed,
        )
        for seed in range(6)
    ]

    async def answers() -> list[list[int]]:
        made = make_engine(ScriptedSettings(name="says_seven_often", scramble=scramble, reads=reads), parts)
        found = {one.request_id: one.response_ids.tolist() async for one in made.generate(asked)}
        return [found[one.request_id] for one in asked]

    return asyncio.run(answers())


def test_a_scripted_engine_says_what_its_responder_says_and_may_spell_it_in_other_tokens() -> None:
    renderer = ChatRenderer(byte_pairs())
    plain, scrambled = (spelled(renderer, scramble=scramble) for scramble in (False, True))
    words = "Why? The answer is seven. " * 3
    assert {renderer.decode(ids) for ids in (*plain, *scrambled)} == {words}
    assert len({*map(tuple, plain)}) == 1
    assert len({*map(tuple, scrambled)}) > 3
    assert all(ids[-1] in renderer.stop_ids for ids in scrambled)


def test_a_scripted_engine_reads_as_much_of_the_prompt_as_it_should() -> None:
    renderer = ChatRenderer(byte_pairs())
    prompt = renderer.encode("Why?")
    for reads, words in [(1, renderer.decode(prompt[-1:])), (None, "Why?"), (99, "Why?")]:
        said = {renderer.decode(ids) for ids in spelled(renderer, reads=reads)}
        assert said == {f"{words} The answer is seven. " * 3}
    assert len(prompt) > 1


def test_a_scripted_engine_ends_at_a_stop_text() -> None:
    renderer = ChatRenderer(byte_pairs())
    assert {renderer.decode(ids) for ids in spelled(renderer, scramble=True, stop=("seven",))} == {
        "Why? The answer is seven"
    }


def test_a_scripted_engine_needs_a_registered_responder() -> None:
    with pytest.raises(ValidationError, match=r"says_seven_oftn.*did you mean 'says_seven_often'"):
        ScriptedSettings(name="says_seven_oftn")
