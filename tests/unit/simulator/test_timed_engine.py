"""Engines that answer after their modelled time, on the real clock: the contract, the model of each policy, weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

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
from flexmarl.simulator.settings import EngineModel
from flexmarl.simulator.timed_engine import TimedEngine, TimedSettings
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import check_inference_engine
from flexmarl.training.backends.causal_lm import load_model

SOLVER, WRITER = PolicyName("solver"), PolicyName("writer")
QUICK = EngineCosts(decode_s=2e-4, decode_request_s=1e-5, load_s=1e-3, move_s=1e-3)
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
