"""Attention along a tree against a dense mask, and which models it is refused to."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from flexmarl.errors import ConfigError
from flexmarl.records import IntArray
from flexmarl.training.tree import attention, kernels
from flexmarl.training.tree.attention import NAME, use_prefix_trees
from flexmarl.training.tree.kernels import BLOCK, FlexAttention, PiecewiseAttention, padded_ends
from flexmarl.training.tree.merge import merge
from flexmarl.training.tree.pieces import attention_pieces
from tests.unit.training.conftest import tiny_model
from tests.unit.training.tree.forests import forests

SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def dense(query: Tensor, key: Tensor, value: Tensor, ends: np.ndarray, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    nodes = np.arange(len(ends))
    visible = torch.from_numpy((nodes <= nodes[:, None]) & (nodes[:, None] < ends))
    return (query @ key.mT * scale).masked_fill(~visible, float("-inf")).softmax(-1) @ value


def projections(num_nodes: int, seed: int) -> list[Tensor]:
    """Queries of four heads, keys and values of two, as a model lays them out."""
    torch.manual_seed(seed)
    shapes = [(1, num_nodes, heads, 4) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2).requires_grad_() for shape in shapes]


@given(forests(), st.sampled_from([1, 5, 64]), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_pieces_give_the_output_and_the_gradients_of_a_dense_mask(
    forest: list[tuple[IntArray, int]], tile: int, seed: int
) -> None:
    tree = merge([row for row, _ in forest], [count for _, count in forest])
    given_ = projections(tree.num_tokens, seed)
    found = PiecewiseAttention(attention_pieces(tree, tile), torch.float64)(*given_, 0.4)
    expected = dense(*given_, tree.ends, 0.4)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found, given_, upstream), torch.autograd.grad(expected, given_, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("few_keys", [0, 256])
def test_gradients_in_bfloat16_are_those_of_a_dense_mask(few_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk that forty branches see, with pieces in the type itself and in float32."""
    monkeypatch.setattr(kernels, "FEW_KEYS", few_keys)
    rows = [np.array([*range(30), 100 + branch, *range(5 + branch % 3)]) for branch in range(40)]
    tree = merge(rows, [1] * len(rows))
    exact = projections(tree.num_tokens, 0)
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    found = PiecewiseAttention(attention_pieces(tree, 16), torch.bfloat16)(*rounded, 0.4)
    expected = dense(*exact, tree.ends, 0.4)
    upstream = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, rounded, upstream.bfloat16()),
        torch.autograd.grad(expected, exact, upstream),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@given(forests(), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_blocks_give_the_output_of_a_dense_mask(forest: list[tuple[IntArray, int]], seed: int) -> None:
    tree = merge([row for row, _ in forest], [count for _, count in forest])
    ends = padded_ends(tree.ends, BLOCK)
    with torch.no_grad():
        given_ = [tensor.detach() for tensor in projections(len(ends), seed)]
        attention = FlexAttention(tree.ends, torch.device("cpu"))
        assert attention.num_nodes == len(ends)
        torch.testing.assert_close(attention(*given_, 0.4), dense(*given_, ends, 0.4), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), tiny_model])
def test_full_attention_models_can_run_along_trees(make: Any) -> None:
    model = make()
    shape = use_prefix_trees(model, "on")
    assert shape is not None
    assert shape.num_layers == 2
    assert shape.attention_width == 16
    inner = [p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name]
    assert shape.linear_parameters == sum(inner)
    assert model.config._attn_implementation == NAME
    assert use_prefix_trees(model, "auto") == shape


def test_off_leaves_the_model_as_it_is() -> None:
    model = tiny_model()
    assert use_prefix_trees(model, "off") is None
    assert model.config._attn_implementation == "sdpa"


def windowed() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))


def mixed() -> PreTrainedModel:
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return Qwen2ForCausalLM(config)


def recurrent() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1, state_size=4))


def eager() -> PreTrainedModel:
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def two_way() -> PreTrainedModel:
    model = tiny_model()
    model.config.is_causal = False
    return model


def apart() -> PreTrainedModel:
    model = tiny_model()
    model._supports_attention_backend = False
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (two_way, "not causal"),
        (apart, "Qwen3ForCausalLM does not use Transformers' attention interface"),
        (windowed, "window of 4 tokens"),
        (mixed, "sliding_attention"),
        (recurrent, "linear_attention"),
        (eager, "'eager'"),
    ],
)
def test_a_model_whose_tokens_see_something_else_is_refused_with_the_reason(make: Any, reason: str) -> None:
    model = make()
    before = model.config._attn_implementation
    assert use_prefix_trees(model, "auto") is None
    with pytest.raises(ConfigError, match=r"training.tree is 'on'.*") as refused:
        use_prefix_trees(model, "on")
    assert reason in str(refused.value)
    assert "tree: auto" in str(refused.value)
    assert model.config._attn_implementation == before


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """As in a process that has seen no model yet: the kinds that it has tried."""
    tried = set[object]()
    monkeypatch.setattr(attention, "_tried", tried)
    return tried


def test_a_model_is_tried_once_for_each_kind(untried: set[object], monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    monkeypatch.setattr(attention, "_wrong_on_trial", tries.append)
    models = [tiny_model(seed=1), tiny_model(seed=2), tiny_model(dtype=torch.float64)]
    for model in models:
        assert use_prefix_trees(model, "auto") is not None
        assert model.config._attn_implementation == NAME
    assert tries == [models[0], models[2]]


@pytest.mark.usefixtures("untried")
def test_a_model_that_ignores_positions_is_found_out_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    rotary = model.model.rotary_emb
    in_order = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: in_order(x, torch.arange(x.shape[1])[None]))
    assert use_prefix_trees(model, "auto") is None
    with pytest.raises(ConfigError, match="gives other outputs on a tree"):
        use_prefix_trees(model, "on")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("untried")
def test_attention_that_cannot_run_here_is_found_out_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_compiler(*_: object) -> None:
        raise RuntimeError("no C compiler was found")

    monkeypatch.setattr(PiecewiseAttention, "__call__", without_a_compiler)
    model = tiny_model()
    assert use_prefix_trees(model, "auto") is None
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match=r"'on'.*RuntimeError: no C compiler was found.*tree: auto"):
        use_prefix_trees(model, "on")
