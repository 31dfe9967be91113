"""Prefix trees on a GPU: flex_attention along the tree against rows without padding, in bfloat16.

    python benchmarks/gpu/tree.py --json

The model has the shape of Qwen2.5-0.5B, with random weights and a fifth of the vocabulary. The rows of a pass stand one
behind the other and each sees itself (a tree without sharing, the same kernel): no padding, and no other difference
than the sharing. Lengths are those of docs/benchmarks.md, in full. Needs CUDA.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from common import interleaved_rates, median_ratio, parser, report
from device_models import half_billion, on_device
from transformers import PreTrainedModel
from tree_workloads import Row, as_samples, work_of_rows, work_of_tree, workloads

from flexmarl.training.backends.forward import Pass, plan, run
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import use_prefix_trees
from flexmarl.training.tree.cost import ModelShape
from flexmarl.training.tree.merge import PrefixTree, cut

VOCABULARY = 32768
"""Of Qwen2.5's 151 936: the head is the same work for tree and rows, and all logits of a pass would not fit an H100."""
MAX_TOKENS = 43008
"""Of one pass: the longest row has 41 699."""


def unshared(rows: list[Row]) -> PrefixTree:
    """The rows one behind the other, each a tree of its own."""
    inputs = [np.concatenate(row)[:-1] for row in rows]
    lengths = np.array([len(row) for row in inputs], dtype=np.int64)
    stops = lengths.cumsum()
    return PrefixTree(
        tokens=np.concatenate(inputs).astype(np.int64),
        depths=np.concatenate([np.arange(n) for n in lengths]),
        starts=stops - lengths,
        stops=stops,
        subtree_stops=stops,
        predictors=np.concatenate([np.arange(b - len(r), b) for b, (_, r) in zip(stops, rows, strict=True)]),
    )


def without_sharing(rows: list[Row], shape: ModelShape) -> list[Pass]:
    """Passes of at most MAX_TOKENS, each without padding, cut as trees are."""
    lengths = np.array([len(prompt) + len(response) - 1 for prompt, response in rows], dtype=np.int64)
    cuts = cut(lengths, np.zeros_like(lengths), MAX_TOKENS, shape.overhead_tokens)
    return [Pass(np.arange(part.start, part.stop), unshared(rows[part])) for part in cuts]


def trained(model: PreTrainedModel, rows: list[Row], passes: list[Pass]) -> Callable[[], float]:
    """Rows per second, forward and backward."""
    samples = as_samples(rows)

    def rate() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for together in passes:
            outputs = run(model, [samples[i] for i in together.rows], tree=together.tree)
            (-outputs.logprobs).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        return len(rows) / (time.perf_counter() - began)

    return rate


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", help="names of workloads (default: all)")
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu/tree.py needs CUDA, and torch sees none; benchmarks/tree.py runs on a CPU")
    model = on_device(half_billion(VOCABULARY), "cuda", "bfloat16")
    shape = use_prefix_trees(model, "on")
    assert shape is not None, "the model runs along trees"
    settings = TrainingSettings(tree="on", dtype="bfloat16", max_tokens_per_forward=MAX_TOKENS)
    figures, lines = {}, []
    for work in workloads(1.0):
        if chosen.only and work.name not in chosen.only:
            continue
        contenders = {
            "tree": trained(model, work.rows, plan(as_samples(work.rows), settings, shape)),
            "rows": trained(model, work.rows, without_sharing(work.rows, shape)),
        }
        rates = interleaved_rates(contenders, chosen.repeats)
        figures[work.name] = median_ratio(rates, "tree", "rows")
        tokens = work_of_rows(work.rows).tokens / work_of_tree(work.rows).tokens
        seconds = len(work.rows) / statistics.median(rates["rows"])
        lines.append([work.name, f"{tokens:.1f}", f"{seconds:.2f} s", f"{figures[work.name]:.2f}"])
        print(*lines[-1], file=sys.stderr, flush=True)
    figures["worst"] = min(figures.values())
    report(
        "Times faster than rows, bfloat16",
        ["workload", "tokens", "rows take", "tree"],
        lines,
        figures,
        as_json=chosen.json,
    )


if __name__ == "__main__":
    main()
