"""Lean log-probabilities against those from all logits at once: values, gradients, and the heads that they are for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from flexmarl.records import Sample
from flexmarl.training.backends import forward, logprobs
from flexmarl.training.backends.causal_lm import precision, use_onednn
from flexmarl.training.backends.forward import ValueHead, plan, run
from flexmarl.training.backends.logprobs import HeadForm, head_form, head_form_of_kind, lean_logprobs, whole_logprobs
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import use_prefix_trees

Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
TINY: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def gemma() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=30.0))


def cohere() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.0625))


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=8.0))


def losses(logprobs: Tensor, entropy: Tensor, pulls: Tensor, *, of_entropy: bool) -> Tensor:
    loss = pulls[0] @ logprobs + (logprobs.square() @ pulls[1])
    return loss + pulls[2] @ entropy if of_entropy else loss


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(1, 12)),
    block=st.tuples(st.integers(1, 10), st.integers(1, 60)),
    form=st.sampled_from([HeadForm(), HeadForm(scale=0.25), HeadForm(cap=3.0), HeadForm(scale=2.0, cap=5.0)]),
    bias=st.booleans(),
    shared=st.booleans(),
    of_entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
    form: HeadForm,
    bias: bool,
    shared: bool,
    of_entropy: bool,
    seed: int,
) -> None:
    num_hidden, width, vocabulary, num_targets = sizes
    random = torch.Generator().manual_seed(seed)
    head = nn.Linear(width, vocabulary, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    hidden = (3 * torch.randn(num_hidden, width, generator=random, dtype=torch.float64)).requires_grad_()
    places = torch.randint(num_hidden, (num_targets,), generator=random) if shared else None
    many = num_targets if shared else num_hidden
    targets = torch.randint(vocabulary, (many,), generator=random)
    pulls = torch.randn(3, many, generator=random, dtype=torch.float64)
    inputs = [hidden, *head.parameters()]

    outputs = form.scale * head(hidden)
    logits = outputs if form.cap is None else form.cap * (outputs / form.cap).tanh()
    whole = whole_logprobs(logits, targets, places=places, entropy_gradient=of_entropy)
    lean = lean_logprobs(hidden, head, targets, form, places=places, entropy_gradient=of_entropy, block=block)

    for expected, found in zip(whole, lean, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(losses(*whole, pulls, of_entropy=of_entropy), inputs)
    gradients = torch.autograd.grad(losses(*lean, pulls, of_entropy=of_entropy), inputs)
    for expected, found in zip(wanted, gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize(
    ("make", "form"),
    [(gemma, HeadForm(cap=30.0)), (cohere, HeadForm(scale=0.0625)), (granite, HeadForm(scale=1 / 8.0))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_and_scales_of_a_family_are_found_in_its_model(
    make: Callable[[], PreTrainedModel], form: HeadForm, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model: Any = make().to(dtype)  # pyright: ignore[reportArgumentType] - torch's own `to`
    assert head_form(model) == form
    use_onednn(model)
    assert head_form(model) == form


def test_a_head_that_is_more_than_a_linear_layer_has_no_form(make_model: Model) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = make_model()
    assert head_form(model) == HeadForm()
    head = Doubled(16, 23, bias=False)
    head.weight = model.get_parameter("lm_head.weight")
    assert head_form_of_kind(model) == HeadForm()
    model.set_output_embeddings(head)
    assert head_form(model) is None
    assert head_form_of_kind(model) is None


def test_a_kind_of_model_is_tried_once(make_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_found", {})
    first, second = make_model(), make_model()
    assert head_form_of_kind(first) == HeadForm()
    monkeypatch.setattr(second, "forward", None)
    assert head_form_of_kind(second) == HeadForm()


def test_a_model_that_changes_its_logits_in_an_unknown_way_has_no_form(
    make_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    plain = model.forward

    def masked(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        found.logits[..., 3] = -torch.inf
        return found

    monkeypatch.setattr(model, "forward", masked)
    assert head_form(model) is None


@pytest.mark.parametrize(
    ("kind", "tree"),  # Gemma's layers with a sliding window cannot run along trees.
    [
        (kind, tree)
        for kind in ("qwen", "gemma", "cohere", "granite")
        for tree in ("off", "on")
        if kind + tree != "gemmaon"
    ],
)
def test_passes_of_every_family_are_the_same_lean(
    make_model: Model, make_samples: Samples, monkeypatch: pytest.MonkeyPatch, kind: str, tree: str
) -> None:
    torch.manual_seed(0)
    model = {"qwen": make_model, "gemma": gemma, "cohere": cohere, "granite": granite}[kind]().double().train()
    shape = use_prefix_trees(model, tree)
    form = head_form(model)
    assert form is not None
    samples = [sample for sample in make_samples(3) if sample.num_tokens]
    chosen = TrainingSettings.model_validate({"tree": tree})
    critic = ValueHead(model)
    found: dict[bool, list[Tensor]] = {}
    for lean in (True, False):
        monkeypatch.setattr(forward, "LEAN_FROM", 0 if lean else 1 << 40)
        model.zero_grad()
        for together in plan(samples, chosen, shape):
            part = [samples[row] for row in together.rows]
            with precision(model):
                out = run(model, part, tree=together.tree, value_head=critic, entropy_gradient=True, form=form)
                assert out.values is not None
                (out.logprobs.square().sum() + out.entropy.sum() + out.values.sum()).backward()
        found[lean] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_a_lean_pass_never_gives_the_head_a_row(
    make_model: Model, make_samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = make_model(), list[int]()
    samples = [sample for sample in make_samples(3) if sample.num_tokens]
    model.get_submodule("lm_head").register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    monkeypatch.setattr(forward, "LEAN_FROM", 0)
    run(model, samples, form=HeadForm())
    run(model, samples, form=None)
    assert rows == [0, sum(sample.num_tokens for sample in samples)]
