"""Laws T1 to T6: training along trees against every row by itself, in float64, for losses of every kind."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from flexmarl.cluster.torch_device import place
from flexmarl.records import AgentName, EpisodeId, FinishReason, PolicyName, Sample, Turn, Version, VersionRun
from flexmarl.records.ids import make_sample_id
from flexmarl.training.aggregation import divisors_of, token_weights
from flexmarl.training.backends.causal_lm import precision, prepare_for_training
from flexmarl.training.backends.forward import ValueHead, plan, run
from flexmarl.training.backends.objective import Objective
from flexmarl.training.kl import KlSettings
from flexmarl.training.losses import Cispo, Gspo, Ppo
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import use_prefix_trees
from flexmarl.training.tree.cost import ModelShape
from flexmarl.training.tree.merge import PrefixTree
from tests.unit.training.conftest import VOCAB, tiny_model
from tests.unit.training.tree.forests import random_rows

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": Ppo(dual_clip=1.5)},
    "gspo": {"loss": Gspo(clip_low=0.2, clip_high=0.2)},
    "cispo": {"loss": Cispo(clip_high=1.0)},
    "kl": {"loss": Ppo(), "kl": KlSettings(type="k3", coef=0.3)},
    "entropy": {"loss": Ppo(), "entropy_coef": 0.1},
}


def llama(seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    place(model, "cpu", dtype)
    return model


def qwen(seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(seed, dtype)


def adapted(seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """With an adapter that has been trained: neither of its two matrices is 0."""
    model = tiny_model(seed, dtype)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"), model)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn_like(parameter, dtype=dtype)
    return model


def forest_samples(seed: int, count: int = 14) -> list[Sample]:
    """Rows that share prefixes, each with its own advantage and old log-probabilities: nothing can be folded."""
    random = np.random.default_rng(seed)
    samples = []
    for hop, (row, num_inputs) in enumerate(random_rows(random, count, VOCAB if seed % 2 else 3)):
        ids = np.append(row, random.integers(0, VOCAB)).astype(np.int32)
        start = len(row) - num_inputs + 1
        logprobs = (-3 + random.normal(size=len(ids) - start)).astype(np.float32)
        turn = Turn(
            sample_id=make_sample_id("task", hop, "g0e0a0"),
            episode=EpisodeId("g0e0a0"),
            agent=AgentName("solver"),
            policy=PolicyName("solver"),
            prompt_ids=ids[:start],
            response_ids=ids[start:],
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
        )
        weight = float(random.choice([0.5, 1.0]))
        samples.append(Sample(turn=turn, advantage=float(random.normal()), weight=weight))
    return samples


Change = Callable[[PrefixTree], PrefixTree]


def gradients(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    chosen: TrainingSettings,
    change: Change = lambda tree: tree,
) -> tuple[float, Tensor]:
    """Loss and gradient of the samples, as the trainer computes them, divided by the divisor of all of them."""
    prepare_for_training(model, activation_checkpointing=chosen.activation_checkpointing)
    shape = use_prefix_trees(model, chosen.tree)
    objective, total = Objective(chosen), 0.0
    weights = token_weights(samples, chosen.loss.aggregation).tolist()
    random = torch.Generator().manual_seed(0)
    opinions = [torch.randn(s.num_tokens, generator=random, dtype=torch.float64) - 3 for s in samples]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with precision(model):
        for together in plan(samples, chosen, shape):
            part = [samples[i] for i in together.rows]
            tree = together.tree and change(together.tree)
            outputs = run(model, part, tree=tree, entropy_gradient=objective.needs_entropy_gradient)
            reference = torch.cat([opinions[i] for i in together.rows]).to(outputs.logprobs.dtype)
            loss, _ = objective(
                part,
                [weights[i] for i in together.rows],
                outputs,
                version=Version(1),
                reference=reference if objective.needs_reference else None,
            )
            loss.backward()
            total += loss.item()
    divided = divisors_of(samples).num_tokens
    found = torch.cat([p.grad.flatten() for p in trained if p.grad is not None]) / divided
    model.zero_grad()
    return total / divided, found


def row_by_row(model: PreTrainedModel, samples: Sequence[Sample], chosen: TrainingSettings) -> tuple[float, Tensor]:
    """One pass per row, without padding."""
    return gradients(model, samples, chosen.model_copy(update={"tree": "off", "max_tokens_per_forward": 1}))


def settings_of(kind: str = "ppo", **more: Any) -> TrainingSettings:
    return TrainingSettings(dtype="float64", tree="on", **OBJECTIVES[kind], **more)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("make", [qwen, llama, adapted])
@pytest.mark.parametrize("kind", OBJECTIVES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_t1_gradients_along_a_tree_are_those_of_the_rows(make: Any, kind: str, seed: int) -> None:
    samples, chosen = forest_samples(seed), settings_of(kind)
    loss, found = gradients(make(), samples, chosen)
    expected_loss, expected = row_by_row(make(), samples, chosen)
    assert relative(found, expected) <= 1e-10
    assert loss == pytest.approx(expected_loss, rel=1e-11)


@pytest.mark.parametrize("make", [qwen, llama, adapted])
def test_t1_in_single_precision(make: Any) -> None:
    for seed in range(6):
        samples = forest_samples(seed)
        chosen = settings_of().model_copy(update={"dtype": "float32"})
        _, found = gradients(make(dtype=torch.float32), samples, chosen)
        _, expected = row_by_row(make(dtype=torch.float32), samples, chosen)
        assert relative(found, expected) <= 1e-5


def test_rows_share_most_of_their_tokens_in_these_tests() -> None:
    model = qwen()
    shape = use_prefix_trees(model, "on")
    (together,) = plan(forest_samples(1), settings_of(), shape)
    assert together.tree is not None
    assert together.tokens_saved > 0.4 * (together.tree.num_tokens + together.tokens_saved)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_t2_the_order_of_the_rows_is_irrelevant(seed: int) -> None:
    samples = forest_samples(seed)
    order = np.random.default_rng(seed).permutation(len(samples))
    _, one = gradients(qwen(), samples, settings_of())
    _, other = gradients(qwen(), [samples[i] for i in order], settings_of())
    assert relative(other, one) <= 1e-12


def test_t3_one_weight_for_a_shared_token_is_not_the_loss_of_its_rows() -> None:
    """The same tokens twice, with other advantages and old log-probabilities: one row is clipped, one is not."""
    first = forest_samples(1)[0]
    second = replace(
        first,
        advantage=-first.advantage,
        turn=replace(first.turn, raw_logprobs=first.turn.raw_logprobs + 2, logprobs=first.turn.logprobs + 2),
    )
    folded = replace(first, advantage=first.advantage + second.advantage)
    _, found = gradients(qwen(), [first, second], settings_of())
    _, expected = row_by_row(qwen(), [first, second], settings_of())
    _, wrong = gradients(qwen(), [folded], settings_of())
    assert relative(found, expected) <= 1e-10
    assert relative(wrong / 2, expected) > 0.1


@pytest.mark.parametrize("max_tokens", [1, 15, 30])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_t4_cuts_into_passes_change_nothing(max_tokens: int, kind: str) -> None:
    samples = forest_samples(3)
    chosen = settings_of(kind, max_tokens_per_forward=max_tokens)
    shape = use_prefix_trees(qwen(), "on")
    assert len(plan(samples, chosen, shape)) > 1
    _, cut = gradients(qwen(), samples, chosen)
    _, whole = gradients(qwen(), samples, settings_of(kind))
    assert relative(cut, whole) <= 1e-12


def test_t4_micro_batches_add_up_to_the_batch() -> None:
    samples = forest_samples(5)
    parts = [samples[:3], samples[3:9], samples[9:]]
    sums = sum(gradients(qwen(), part, settings_of())[1] * divisors_of(part).num_tokens for part in parts)
    assert isinstance(sums, Tensor)
    _, whole = gradients(qwen(), samples, settings_of())
    assert relative(sums / divisors_of(samples).num_tokens, whole) <= 1e-12


def test_t5_duplicate_rows_count_twice_in_divisors_and_in_the_gradient() -> None:
    samples = forest_samples(7)
    twice = [*samples, *samples]
    _, once = gradients(qwen(), samples, settings_of())
    _, found = gradients(qwen(), twice, settings_of())
    assert relative(found, once) <= 1e-12
    assert divisors_of(twice).num_tokens == 2 * divisors_of(samples).num_tokens


def moved(values: np.ndarray, place: int, by: int) -> np.ndarray:
    changed = values.copy()
    changed[place] += by
    return changed


def orphaned(tree: PrefixTree) -> PrefixTree:
    """The last child of a segment hangs on the segment's parent instead."""
    for child, start in enumerate(tree.starts):
        above = np.flatnonzero((tree.stops <= start) & (tree.subtree_stops >= tree.subtree_stops[child]))
        parent = above[-1] if len(above) else child
        if start > tree.stops[parent] and tree.subtree_stops[child] == tree.subtree_stops[parent]:
            return replace(tree, subtree_stops=moved(tree.subtree_stops, parent, start - tree.subtree_stops[parent]))
    raise AssertionError("the tree has no fork")


MUTATIONS: dict[str, Change] = {
    "a parent": orphaned,
    "a position": lambda tree: replace(tree, depths=moved(tree.depths, tree.num_tokens // 2, 1)),
    "a label": lambda tree: replace(tree, predictors=moved(tree.predictors, 1, 1)),
    "a token": lambda tree: replace(tree, tokens=(moved(tree.tokens, 0, 1)) % VOCAB),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_t6_one_wrong_number_in_the_tree_is_seen_in_the_gradient(name: str) -> None:
    samples = forest_samples(1)
    chosen = settings_of("cispo")  # no token's gradient is clipped away
    _, expected = row_by_row(qwen(), samples, chosen)
    _, wrong = gradients(qwen(), samples, chosen, MUTATIONS[name])
    assert relative(wrong, expected) > 1e-6


@pytest.mark.parametrize("make", [qwen, adapted])
def test_activation_checkpointing_repeats_a_pass_along_its_tree(make: Any) -> None:
    samples = forest_samples(2)
    _, found = gradients(make(), samples, settings_of(activation_checkpointing=True))
    _, expected = row_by_row(make(), samples, settings_of())
    assert relative(found, expected) <= 1e-10


def test_values_of_a_critic_are_gathered_as_log_probabilities_are() -> None:
    model, samples = qwen(), forest_samples(4)
    head = ValueHead(model)
    torch.nn.init.normal_(head.weight)
    with precision(model), torch.no_grad():
        (together,) = plan(samples, settings_of(), use_prefix_trees(model, "on"))
        part = [samples[i] for i in together.rows]
        along = run(model, part, tree=together.tree, value_head=head).values
        alone = [run(model, [sample], value_head=head).values for sample in part]
    assert along is not None
    torch.testing.assert_close(along, torch.cat([v for v in alone if v is not None]), rtol=1e-11, atol=1e-12)


def test_auto_takes_rows_that_share_nothing_as_rows() -> None:
    shape = use_prefix_trees(qwen(), "on")
    random = np.random.default_rng(0)
    first = forest_samples(1)[0]
    apart = [
        replace(first, turn=replace(first.turn, prompt_ids=random.integers(0, 2**31 - 1, 30).astype(np.int32)))
        for _ in range(6)
    ]
    chosen = settings_of().model_copy(update={"tree": "auto"})
    assert all(together.tree is None for together in plan(apart, chosen, shape))
    # Of many lengths, in a larger model: padding would be saved, and nothing else.
    larger = ModelShape(linear_parameters=10_000_000, num_layers=2, attention_width=256)
    ragged = [
        replace(first, turn=replace(first.turn, prompt_ids=random.integers(0, VOCAB, length).astype(np.int32)))
        for length in range(10, 400, 12)
    ]
    assert all(together.tree is None for together in plan(ragged, chosen, larger))
    prompt = random.integers(0, VOCAB, 3000).astype(np.int32)
    shared = [replace(s, turn=replace(s.turn, prompt_ids=prompt)) for s in apart]
    (together,) = plan(shared, chosen, shape)
    assert together.tree is not None
    assert together.tokens_saved == 5 * (len(prompt) + first.num_tokens - 1)
