"""Training along prefix trees on the device: are the gradients right, is it faster, and does `auto` see it?

Also what the rates of `training/tree/cost.py` should be on this device: they are constants, derived and not measured.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import device_models
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from tree_workloads import Row, as_samples

from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import precision
from flexmarl.training.backends.forward import Pass, plan, run
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import shape_of, use_prefix_trees
from flexmarl.training.tree.cost import RATES, ModelShape

REPEATS = 3


def measure(device: str, *, short: bool) -> tuple[dict[str, Any], str]:
    """Figures, and what is wrong with them; empty when nothing is."""
    on_cuda = device.startswith("cuda")
    dtype: Any = "bfloat16" if on_cuda else "float32"
    make = device_models.seed_model if short else device_models.thirty_million
    model, exact = device_models.on_device(make(), device, dtype), device_models.on_device(make(), device, "float32")
    for theirs, ours in zip(exact.parameters(), model.parameters(), strict=True):
        theirs.data = ours.data.float()
    began = time.perf_counter()
    shape = use_prefix_trees(model, "on")
    figures: dict[str, Any] = {"trial_s": round(time.perf_counter() - began, 2)}
    wrong = ""
    for name, rows in groups(int(model.config.get_text_config().vocab_size), short=short).items():
        on = TrainingSettings(tree="on", dtype=dtype)
        figures[name] = found = compared(model, exact, shape, as_samples(rows), on, device)
        if found["tree_off_by"] > 1.5 * found["rows_off_by"] + 1e-5:
            wrong = wrong or f"{name}: gradients along the tree are farther off than rounding takes those of the rows"
    if on_cuda:
        figures["rates"] = rates(model, device)
    return figures, wrong


def compared(
    model: PreTrainedModel,
    exact: PreTrainedModel,
    shape: ModelShape | None,
    samples: Sequence[Sample],
    on: TrainingSettings,
    device: str,
) -> dict[str, Any]:
    """The samples along their tree and row by row; `exact` has the same weights in float32."""
    off, auto = (on.model_copy(update={"tree": tree}) for tree in ("off", "auto"))
    along, alone = plan(samples, on, shape), plan(samples, off, overhead=shape_of(model).overhead_tokens)
    right = gradient(exact, samples, alone)
    tree_off_by, rows_off_by = (difference(gradient(model, samples, passes), right) for passes in (along, alone))
    tree_s, rows_s = (timed(partial(gradient, model, samples, passes), device) for passes in (along, alone))
    return {
        "tree_off_by": float(f"{tree_off_by:.2g}"),
        "rows_off_by": float(f"{rows_off_by:.2g}"),
        "rows_s": round(rows_s, 4),
        "tree_s": round(tree_s, 4),
        "faster": round(rows_s / tree_s, 2),
        "auto_takes_trees": all(together.tree is not None for together in plan(samples, auto, shape)),
    }


def groups(vocabulary: int, *, short: bool) -> dict[str, list[Row]]:
    """Responses to one prompt: far more than a pass must have on a GPU, and far less."""
    random = np.random.default_rng(0)

    def group(prompt: int, responses: int, length: int) -> list[Row]:
        shared = random.integers(0, vocabulary, prompt).astype(np.int32)
        return [(shared, random.integers(0, vocabulary, length).astype(np.int32)) for _ in range(responses)]

    small = {"8 of 20 after 100": group(100, 8, 20)}
    return small if short else {"8 of 500 after 1500": group(1500, 8, 500), **small}


def gradient(model: PreTrainedModel, samples: Sequence[Sample], passes: Sequence[Pass]) -> Tensor:
    """Of all log-probabilities, weighted by the advantages, in float32."""
    with precision(model):
        for together in passes:
            part = [samples[i] for i in together.rows]
            outputs = run(model, part, tree=together.tree)
            weights = np.concatenate([np.full(s.num_tokens, s.advantage, np.float32) for s in part])
            (outputs.logprobs * torch.from_numpy(weights).to(outputs.logprobs.device)).sum().backward()
    found = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def difference(one: Tensor, other: Tensor) -> float:
    """Relative, of two gradients."""
    return float((one - other).norm() / other.norm())


def timed(work: Callable[[], object], device: str) -> float:
    """Least seconds of some repeats, each until the device has done it; nothing compiles in them."""
    work()
    spent = []
    for _ in range(REPEATS):
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        spent.append(time.perf_counter() - began)
    return min(spent)


def wait_for(device: str) -> None:
    """Until the device has nothing left to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def rates(model: PreTrainedModel, device: str) -> dict[str, Any]:
    """What `RATES["cuda"]` says and what this device does: a product's speed, and a layer's least time."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    speed = 2 * size**3 / timed(lambda: left @ right, device)
    tiny = as_samples([(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))])
    layer_s = timed(lambda: gradient(model, tiny, [Pass(np.array([0]))]), device) / shape_of(model).num_layers
    return {
        "product_tflops": round(speed / 1e12, 1),
        "layer_ms": round(layer_s * 1e3, 3),
        "layer_operations": float(f"{layer_s * speed:.2g}"),
        "layer_operations_assumed": RATES["cuda"].layer,
    }
