"""The memory that `check` foretells, against tensors that trainers and passes really hold."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from flexmarl.assemble.needed_memory import ModelSize, Part, parts, pass_of, peak_bytes, size_of
from flexmarl.config.run_settings import PolicySettings, RunSettings
from flexmarl.events.machine import GIB
from flexmarl.inference.backends.embedded.kv_cache import BlockCache
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import (
    FinishReason,
    Generation,
    GenerationRequest,
    MicroBatch,
    PolicyName,
    Sampling,
    Version,
    VersionRun,
)
from flexmarl.testing.training import sample_of
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer

SOLVER = PolicyName("solver")
FORMS: list[dict[str, Any]] = [
    {},
    {"lora": {"rank": 4}},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "lora": {"rank": 4}},
]


def small_model(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **more,
        )
    )


def policy_of(training: dict[str, Any], **engine: Any) -> PolicySettings:
    engine = {"type": "embedded", "dtype": training.get("dtype", "float32")} | engine
    return PolicySettings.model_validate({"model": "here", "engine": engine, "training": training}).publishing()


def sampled() -> Generation:
    return Generation(
        request_id="one",
        response_ids=np.arange(4, 7, dtype=np.int32),
        logprobs=np.full(3, -1, np.float32),
        raw_logprobs=np.full(3, -1, np.float32),
        versions=(VersionRun(0, Version(0)),),
        finish=FinishReason.STOP,
    )


def counted(policy: PolicySettings) -> ModelSize:
    with torch.device("meta"):
        model = small_model()
    return size_of(model, policy)


def by_name(found: list[Part]) -> dict[str, float]:
    return {part.name: part.num_bytes for part in found}


def run_of(policy: PolicySettings) -> RunSettings:
    return RunSettings.model_validate(
        {
            "cluster": {"backend": "inline"},
            "tasks": {"type": "generator", "name": "any"},
            "policies": {"solver": policy.model_dump()},
            "team": {
                "workflow": {"type": "custom", "name": "any"},
                "agents": {"solver": {"policy": "solver", "system": "solve"}},
            },
        }
    )


def test_a_deterministic_engine_has_memory_for_a_layer_at_full_length() -> None:
    policy = policy_of({}, slots=6, max_len=96, kv_block=16)
    run = RunSettings.model_validate(run_of(policy).model_dump() | {"deterministic": True})
    sizes = {"solver": counted(policy)}
    padding = BlockCache(small_model(), 16, 96, number=64)._padding(6)
    assert by_name(parts(run, sizes))["a layer's keys and values"] == padding.nbytes
    assert "a layer's keys and values" not in by_name(parts(run_of(policy), sizes))


@pytest.mark.parametrize("training", FORMS)
def test_weights_gradients_and_moments_are_those_that_a_trainer_holds(training: dict[str, Any]) -> None:
    policy = policy_of(training)
    found = by_name(parts(run_of(policy), {"solver": counted(policy)}))
    trainer = SingleProcessTrainer(SOLVER, small_model(), policy.training, InlineObjectStore())
    request = GenerationRequest(
        request_id="one", policy=SOLVER, prompt_ids=np.arange(1, 4, dtype=np.int32), sampling=Sampling(), seed=0
    )
    samples = [sample_of(request, sampled())]

    async def update() -> tuple[int, int, int]:
        await trainer.accumulate_batch(MicroBatch(micro_batch_id="mb", policy=SOLVER, samples=tuple(samples)))
        sums = sum(tensor.nbytes for tensor in trainer._cache.tensors)
        await trainer.step(divisors_of(samples))
        await trainer.publish(Version(1))
        tree = await trainer._objects.get(next(iter(trainer._objects._objects)))
        state = (await trainer.state()).tensors
        kept = sum(tensor.nbytes for kind in state.keys() - {"weights", "buffers"} for tensor in state[kind].values())
        return sums, sum(tensor.nbytes for tensor in tree.values()), kept

    sums, published, kept = asyncio.run(update())
    held = {id(p): p.nbytes for p in trainer._network.model.parameters()}
    held |= {id(master): master.nbytes for master in trainer._updater.masters.values()}
    moments = [state[name] for state in trainer._updater.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert found["trainers' weights"] == sum(held.values())
    assert found["gradients"] == sums
    tensors = pass_of(policy.training, counted(policy)).num_bytes
    assert found["a pass"] == pytest.approx(1.23 * tensors + sums), "what it adds to the sums, too"
    assert found["optimiser"] == sum(moment.nbytes for moment in moments)
    assert found["published version"] == pytest.approx(published, rel=0.02), "an adapter names its base too"
    assert "kept states" not in found
    for groups, expected in (
        ({"keep_updated": True}, kept),
        ({"keep_updated": True, "copies": 2}, 2 * kept + published),
    ):
        ray = run_of(policy).model_dump() | {
            "cluster": {"backend": "ray", "address": "here:1"},
            "process_groups": groups,
        }
        on_places = parts(RunSettings.model_validate(ray), {"solver": counted(policy)})
        assert by_name(on_places)["kept states"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("training", FORMS)
def test_sums_of_open_groups_are_those_that_a_trainer_holds_where_all_groups_are_open(training: dict[str, Any]) -> None:
    policy, groups = policy_of(training), 3
    settings = run_of(policy).model_dump()
    settings |= {"batch": {"groups": groups, "episodes": 2}, "credit": {"streaming": "linear"}}
    foretold = [
        by_name(parts(RunSettings.model_validate(settings | {"rollout": {"inter_query": at_once}}), sizes))
        for sizes in [{"solver": counted(policy)}]
        for at_once in (8, groups, 2)
    ]
    trainer = SingleProcessTrainer(SOLVER, small_model(), policy.training, InlineObjectStore())
    request = GenerationRequest(
        request_id="one", policy=SOLVER, prompt_ids=np.arange(1, 4, dtype=np.int32), sampling=Sampling(), seed=0
    )
    rows = tuple(replace(sample_of(request, sampled()), open_group=f"g{number}") for number in range(groups))
    asyncio.run(trainer.accumulate_batch(MicroBatch(micro_batch_id="mb", policy=SOLVER, samples=rows)))
    held = sum(t.nbytes for sums in trainer._cache.open.values() for t in (*sums.scored, *sums.plain))
    assert [one["open groups"] for one in foretold] == [held, held, held * 2 / 3]
    assert "open groups" not in by_name(parts(run_of(policy), {"solver": counted(policy)}))


@pytest.mark.parametrize("training", FORMS)
@pytest.mark.parametrize("tokens", [64, 256])
def test_a_pass_keeps_as_much_of_each_token_as_is_foretold(training: dict[str, Any], tokens: int) -> None:
    policy = policy_of(training)
    trainer = SingleProcessTrainer(SOLVER, small_model(), policy.training, InlineObjectStore())
    model = trainer._network.model
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    real = sum(storage.nbytes() for storage in kept.values()) / tokens
    assert counted(policy).token_bytes == pytest.approx(real, rel=0.1)


def test_checkpointed_activations_are_the_inputs_of_layers_and_one_layer_of_all() -> None:
    plain, lean = (counted(policy_of({"activation_checkpointing": on})).token_bytes for on in (False, True))
    assert lean == pytest.approx(3 * 192 * 4 + plain / 3)


def test_the_largest_part_comes_first_and_the_setting_that_it_names_lowers_it() -> None:
    policy = policy_of({"max_tokens_per_forward": 65536}, slots=2, max_len=64)
    size = counted(policy)
    found = parts(run_of(policy), {"solver": size})
    assert [part.num_bytes for part in found] == sorted((part.num_bytes for part in found), reverse=True)
    # This process, whose libraries are counted, also holds what other tests have left: gigabytes at times.
    first, *_ = (part for part in found if part.name != "libraries")
    assert (first.name, first.setting) == ("a pass", "training.max_tokens_per_forward")
    fewer = policy.training.model_copy(update={"max_tokens_per_forward": 32768})
    assert pass_of(fewer, size).num_bytes < 0.6 * first.num_bytes


@pytest.mark.parametrize(("device", "suspended"), [("cpu", 5.0), ("cuda", 5.0 + 3.0 + 8.0)])
@pytest.mark.parametrize("engines", [1.0, 100.0])
def test_colocated_engines_and_trainers_are_never_there_together(device: str, suspended: float, engines: float) -> None:
    found = [
        Part(name, num_bytes, "")
        for name, num_bytes in {
            "engines' weights": engines,
            "keys and values": 2.0,
            "a pass": 5.0,
            "trainers' weights": 3.0,
            "optimiser": 8.0,
            "libraries": 7.0,
        }.items()
    ]
    everything = engines + 2.0 + 5.0 + 3.0 + 8.0 + 7.0
    run = run_of(policy_of({}))
    ray = run.cluster.model_copy(update={"backend": "ray", "device": device})
    colocated = run.model_copy(update={"cluster": ray, "mode": Mode.COLOCATED})
    assert peak_bytes(colocated, found) == everything - min(engines + 2.0, suspended)
    assert peak_bytes(run.model_copy(update={"cluster": ray}), found) == everything
    assert peak_bytes(run.model_copy(update={"mode": Mode.COLOCATED}), found) == everything, "inline, trainers stay"


def test_a_frozen_policy_takes_an_engine_and_nothing_for_training() -> None:
    policy = policy_of({}).model_copy(update={"trainable": False, "instances": 2})
    size = counted(policy)
    found = by_name(parts(run_of(policy), {"solver": size}))
    assert found.keys() == {"libraries", "engines' weights", "keys and values"}
    assert found["engines' weights"] == 2 * 4 * size.parameters


def of_vllm(device: str, training: dict[str, Any], **engine: Any) -> dict[str, float]:
    """Parts of a policy on two instances, each on an accelerator of 80 GiB if it is on one."""
    policy = policy_of({"dtype": "bfloat16", **training}, type="vllm", **engine).model_copy(update={"instances": 2})
    run = run_of(policy)
    run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"device": device})})
    return by_name(parts(run, {"solver": counted(policy)}, device_bytes=80 * GIB if device == "cuda" else 0))


def test_an_accelerator_of_vllm_holds_its_weights_once_and_the_keys_and_values_that_are_set() -> None:
    weights = 2 * counted(policy_of({})).parameters
    on_cpu = of_vllm("cpu", {})
    assert (on_cpu["engines' weights"], on_cpu["keys and values"]) == (2 * 2 * weights, 2 * GIB)
    on_cuda = of_vllm("cuda", {}, kv_gib=3)
    assert (on_cuda["engines' weights"], on_cuda["keys and values"]) == (2 * weights, 2 * 3 * GIB)


def test_vllm_takes_what_its_weights_leave_of_its_share_of_an_accelerator() -> None:
    for options, share in (({}, 0.92), ({"gpu_memory_utilization": 0.5}, 0.5)):
        found = of_vllm("cuda", {}, options=options)
        assert found["engines' weights"] + found["keys and values"] == pytest.approx(2 * share * 80 * GIB)


def test_an_instance_has_room_for_each_version_of_its_adapters_on_all_layers_at_the_next_rank_of_vllm() -> None:
    lora = {"lora": {"rank": 4, "target_modules": ["q_proj"]}}
    # In step, each of three adapters has one version; and one comes.
    size, places = counted(policy_of(lora)), 3 * 1 + 1
    attention, mlp, ends = 2 * (192 + 192) + 2 * (192 + 96), 3 * (192 + 512), 2 * (192 + 64)
    assert size.adaptable == 3 * (attention + mlp) + ends
    found = of_vllm("cuda", lora, adapters={"slots": 3, "max_rank": 24})
    assert found["engines' weights"] == 2 * 2 * (size.parameters + places * 32 * size.adaptable)


def test_all_logits_count_where_the_head_is_more_than_a_linear_layer() -> None:
    policy = policy_of({"max_tokens_per_forward": 1 << 20})
    size = counted(policy)
    whole = ModelSize(**{name: getattr(size, name) for name in size.__slots__} | {"is_linear": False})
    more = pass_of(policy.training, whole).num_bytes - pass_of(policy.training, size).num_bytes
    assert more > 3 * 4 * (1 << 20) * 64


def test_keys_and_values_are_those_of_requests_as_they_are_foreseen_and_at_most_those_of_the_longest() -> None:
    policy = policy_of({}, slots=4, kept_prefixes=2, max_len=8192, kv_block=32)
    size = counted(policy)
    block = 4 * size.cached * 32

    def held(longest: dict[str, int], policy: PolicySettings = policy) -> Part:
        (found,) = [part for part in parts(run_of(policy), {"solver": size}, longest) if part.name == "keys and values"]
        return found

    assert held({}) == ("keys and values", 6 * 256 * block, "engine.max_len", 0)
    assert held({"solver": 9000}) == held({})
    assert held({"solver": 100}) == ("keys and values", 6 * 4 * block, "engine.kv_gib", 6 * 256 * block)
    capped = policy_of({}, slots=4, kept_prefixes=2, max_len=8192, kv_block=32, kv_gib=10 * block / GIB)
    assert held({"solver": 100}, capped) == ("keys and values", 10 * block, "engine.kv_gib", 0)


def test_no_more_requests_are_foreseen_to_run_than_the_episodes_at_once_can_ask() -> None:
    policy = policy_of({}, slots=8, kept_prefixes=2, max_len=8192, kv_block=32)
    size, block = counted(policy), 4 * counted(policy).cached * 32
    settings = run_of(policy).model_dump() | {"rollout": {"inter_query": 3, "intra_query": 1}}
    agents = settings["team"]["agents"]
    for count, running in ((1, 3), (2, 6), (3, 8)):
        settings["team"]["agents"] = {f"solver{number}": agents["solver"] for number in range(count)}
        run = RunSettings.model_validate(settings)
        assert by_name(parts(run, {"solver": size}, {"solver": 32}))["keys and values"] == (running + 2) * block
        assert by_name(parts(run, {"solver": size}))["keys and values"] == 10 * 256 * block, "as it is set"


def test_two_policies_add_up_in_what_is_foreseen_and_in_what_is_allowed() -> None:
    one, other = Part("a", 2, "x", 5), Part("a", 3, "y")
    assert one.plus(other) == Part("a", 5, "x", 8)
    assert other.plus(other) == Part("a", 6, "y")


def test_a_pass_on_a_processor_takes_the_holes_of_the_heap_too() -> None:
    policy = policy_of({"max_tokens_per_forward": 4096})
    size, run = counted(policy), run_of(policy)
    on_cuda = run.model_copy(update={"cluster": run.cluster.model_copy(update={"device": "cuda"})})
    tensors, gradients = pass_of(policy.training, size).num_bytes, 4 * size.trained
    assert by_name(parts(on_cuda, {"solver": size}))["a pass"] == tensors + gradients
    assert 1.1 * tensors < by_name(parts(run, {"solver": size}))["a pass"] - gradients < 1.3 * tensors
