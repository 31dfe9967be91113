"""The GPU benchmark's parts, as far as they run without a GPU."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_cuda_it_says_so_and_names_the_other_benchmark() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu/tree.py"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "needs CUDA" in ended.stderr
    assert "benchmarks/tree.py" in ended.stderr


def test_the_logits_of_a_pass_fit_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    from tree import MAX_TOKENS, VOCABULARY
    from tree_workloads import as_samples, workloads

    from flexmarl.training.backends.forward import plan
    from flexmarl.training.settings import TrainingSettings
    from flexmarl.training.tree.cost import ModelShape

    work = next(w for w in workloads(1.0) if w.name == "wide")
    shape = ModelShape(linear_parameters=1, num_layers=1, attention_width=1)
    passes = plan(as_samples(work.rows), TrainingSettings(tree="on", max_tokens_per_forward=MAX_TOKENS), shape)
    nodes = max(len(np.unique(p.tree.predictors)) for p in passes if p.tree is not None)
    # In float32: the logits, their log-probabilities, and two more of the size for the entropy.
    assert 4 * 4 * nodes * VOCABULARY < 0.5 * 78 * 2**30


def test_its_rows_without_padding_give_what_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    from tree import unshared
    from tree_workloads import as_samples, workloads

    from flexmarl.training.backends.forward import run
    from flexmarl.training.tree.attention import use_prefix_trees
    from tests.unit.training.conftest import tiny_model

    rows = [(p % 23, r % 23) for p, r in next(w for w in workloads(0.01) if w.name == "short").rows[:6]]
    samples = as_samples(rows)
    model = tiny_model().eval()
    use_prefix_trees(model, "on")
    with torch.no_grad():
        found = run(model, samples, tree=unshared(rows)).logprobs
        torch.testing.assert_close(found, run(model, samples).logprobs, rtol=1e-4, atol=1e-5)
