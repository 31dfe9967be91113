"""Linear layers on oneDNN against torch's own."""

import pytest
import torch
from torch import nn

from flexmarl.training.backends.causal_lm import MIN_ROWS, OneDnnLinear, load_model, use_onednn
from tests.unit.training.conftest import tiny_model

ROWS = MIN_ROWS * 3


def layers(*, bias=True, dtype=torch.float32):
    """The same layer twice, on oneDNN and plain."""
    torch.manual_seed(0)
    plain = nn.Linear(40, 24, bias=bias, dtype=dtype)
    ours = nn.Sequential(nn.Linear(40, 24, bias=bias, dtype=dtype))
    ours[0].load_state_dict(plain.state_dict())
    use_onednn(ours)
    assert type(ours[0]) is OneDnnLinear
    return ours[0], plain


def gradients(layer, x):
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_torchs_own(bias):
    ours, plain = layers(bias=bias)
    x = torch.randn(3, ROWS // 3, 40)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-6)
    for our, their in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "dtype"), [(MIN_ROWS - 1, torch.float32), (ROWS, torch.float64)])
def test_few_rows_and_other_types_are_left_to_torch(rows, dtype):
    ours, plain = layers(dtype=dtype)
    x = torch.randn(rows, 40, dtype=dtype)
    assert torch.equal(ours(x), plain(x))


def test_a_frozen_layer_hands_gradients_through_and_gets_none():
    ours, plain = layers()
    for layer in (ours, plain):
        layer.requires_grad_(False)
    x = torch.randn(ROWS, 40)
    ((our, *none), (their, *_)) = gradients(ours, x), gradients(plain, x)
    torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-5)
    assert none == [None, None]


def test_a_row_has_the_same_bits_wherever_it_stands():
    ours, _ = layers()
    row = torch.randn(40)
    for rows in (MIN_ROWS, 2 * MIN_ROWS, 8 * MIN_ROWS):
        x = torch.randn(rows, 40)
        x[:: MIN_ROWS // 2] = row
        assert torch.equal(ours(x)[:: MIN_ROWS // 2], ours(row.expand(MIN_ROWS, 40))[: 2 * rows // MIN_ROWS])


def test_a_loaded_model_runs_on_it_and_saves_as_before(tmp_path):
    tiny_model().save_pretrained(tmp_path / "plain")
    loaded = load_model(tmp_path / "plain")
    assert any(isinstance(module, OneDnnLinear) for module in loaded.modules())
    loaded.save_pretrained(tmp_path / "again")
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "again")]
    assert saved[0] == saved[1]
