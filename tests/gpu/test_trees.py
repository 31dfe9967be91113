"""Training along prefix trees on the device: `flex_attention` on CUDA, piece by piece on a CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.cluster.torch_device import place
from flexmarl.errors import ConfigError
from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import DTYPES, precision, prepare_for_training
from flexmarl.training.backends.forward import Pass, plan, run
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import use_prefix_trees
from tests.gpu.models import MODELS, qwen3, rows

SETTINGS = TrainingSettings(tree="on")


def prepared(model: PreTrainedModel, device: str, dtype: str, *, checkpointing: bool = False) -> PreTrainedModel:
    place(model, device, DTYPES[dtype])  # type: ignore[index]
    prepare_for_training(model, activation_checkpointing=checkpointing)
    return model


def gradient(model: PreTrainedModel, samples: Sequence[Sample], passes: Sequence[Pass]) -> Tensor:
    """Of the sum of all log-probabilities, weighted by the advantages, on the CPU in float64."""
    with precision(model):
        for together in passes:
            part = [samples[i] for i in together.rows]
            outputs = run(model, part, tree=together.tree)
            weights = np.concatenate([np.full(s.num_tokens, s.advantage) for s in part])
            (outputs.logprobs * torch.from_numpy(weights).to(outputs.logprobs)).sum().backward()
    found = torch.cat([p.grad.detach().cpu().double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def alone(samples: Sequence[Sample]) -> list[Pass]:
    return [Pass(np.array([i])) for i in range(len(samples))]


# Float32 for one width only: its kernels take half a minute to compile on CUDA.
CASES = [("float32", 1e-3, "qwen3"), ("float32", 1e-3, "llama"), *(("bfloat16", 5e-2, name) for name in MODELS)]


@pytest.mark.parametrize(("dtype", "at_most", "name"), CASES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_gradients_along_a_tree_are_those_of_a_cpu_row_by_row(
    dtype: str, at_most: float, name: str, checkpointing: bool, device: str
) -> None:
    # 4 episodes are one block of 128 nodes, 12 are several: two kernels on CUDA.
    forests = [rows(1), rows(2, episodes=12, prompt=90), rows(3, episodes=9, prompt=200)]
    model = prepared(MODELS[name](), device, dtype, checkpointing=checkpointing)
    shape = use_prefix_trees(model, "on")
    there = prepared(MODELS[name](), "cpu", "float64")
    if dtype == "bfloat16":  # The same rounded weights: what is compared is the arithmetic.
        for ours, theirs in zip(model.parameters(), there.parameters(), strict=True):
            theirs.data = ours.data.cpu().double()
    for samples in forests:
        passes = plan(samples, SETTINGS, shape)
        assert all(together.tree is not None for together in passes)
        found, expected = gradient(model, samples, passes), gradient(there, samples, alone(samples))
        assert float((found - expected).norm() / expected.norm()) <= at_most


def test_heads_that_are_too_small_for_the_kernel_go_row_by_row_on_cuda(device: str) -> None:
    """On a CPU there is no least size, and they go along trees."""
    model = prepared(qwen3(head_dim=8), device, "float32")
    if device == "cpu":
        assert use_prefix_trees(model, "auto") is not None
        return
    assert use_prefix_trees(model, "auto") is None
    with pytest.raises(ConfigError, match="at least 16"):
        use_prefix_trees(model, "on")
    found, there = gradient(model, rows(1), alone(rows(1))), prepared(qwen3(head_dim=8), "cpu", "float64")
    expected = gradient(there, rows(1), alone(rows(1)))
    assert float((found - expected).norm() / expected.norm()) <= 1e-3


@pytest.mark.gpu
def test_forests_of_all_sizes_need_no_more_than_four_kernels(device: str) -> None:
    from torch._dynamo.utils import counters

    model = prepared(qwen3(), device, "bfloat16")
    shape = use_prefix_trees(model, "on")
    before: Any = counters["stats"]["unique_graphs"]
    for seed in range(12):
        samples = rows(seed, episodes=1 + 3 * seed, prompt=20 + 30 * seed)
        gradient(model, samples, plan(samples, SETTINGS, shape))
        with torch.no_grad():
            for together in plan(samples, SETTINGS, shape):
                run(model, [samples[i] for i in together.rows], tree=together.tree)
    assert counters["stats"]["unique_graphs"] - before <= 4
