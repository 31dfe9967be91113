"""Prefix-tree training against one padded row per call, and against calls stitched into chains, on a CPU.

    python benchmarks/tree.py --json

Each contender does what the trainer does with a micro-batch: plans its passes, and for each one forward, PPO loss and
backward. Rows go as well as they can: of like length together, padded, on causal SDPA. `auto` is the setting's
default, `tree` is `on`. The bound is how many fewer operations a tree takes, the vocabulary's layer aside; lengths are
a tenth of those described, and so the model is small: 2 layers, width 256. `own_type`, with `--dtype bfloat16`: time
of a tree whose attention goes backward in that type alone, by that of `on`, which takes float32 where keys are few.
"""

import statistics
import time
from collections.abc import Callable

import torch
from common import interleaved_rates, median_ratio, parser, report
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from tree_workloads import VOCABULARY, Workload, as_samples, stitched, work_of_rows, work_of_tree, workloads

from flexmarl.records import Sample, Version
from flexmarl.training.backends.causal_lm import prepare_for_training, use_onednn
from flexmarl.training.backends.forward import plan, predict, run
from flexmarl.training.backends.objective import Objective
from flexmarl.training.batching import pad, plan_passes
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree import kernels
from flexmarl.training.tree.attention import use_prefix_trees
from flexmarl.training.tree.cost import ModelShape

WANTED = {
    "steps10": 5.0,
    "steps80": 24.0,
    "group": 3.0,
    "bushy": 3.0,
    "wide": 1.5,
    "bound_share_min": 0.85,
    "worst": 0.95,
}
LEAST_S = 1.0
"""Of one measurement. Measured alone, a micro-batch of 50 ms took 10% longer right after one of rows, whose memory has
to be given back first: whoever came first in a round looked slower."""
HELPS = 3.0
"""Shares of the bound count where it is at least this."""


def small_model(dtype: torch.dtype) -> PreTrainedModel:
    """Qwen3-type, 1.7M parameters, 12 d^2 of them per layer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.to(dtype)  # pyright: ignore[reportArgumentType] - its annotations lose `self`
    use_onednn(model)
    prepare_for_training(model, activation_checkpointing=False)
    return model


def timed(micro_batch: Callable[[], None], clock: Callable[[], float]) -> Callable[[], float]:
    """The same over and over, as micro-batches per second: a trainer's neighbours are its own kind."""

    def rate() -> float:
        began, done = clock(), 0
        while clock() - began < LEAST_S:
            micro_batch()
            done += 1
        return done / (clock() - began)

    return rate


def trained(model: PreTrainedModel, samples: list[Sample], tree: str, shape: ModelShape | None) -> Callable[[], None]:
    """One micro-batch, as the trainer trains it."""
    settings = TrainingSettings(tree=tree)  # pyright: ignore[reportArgumentType] - one of its three words
    objective = Objective(settings)

    def once() -> None:
        for together in plan(samples, settings, shape):
            part = [samples[i] for i in together.rows]
            outputs = run(model, part, tree=together.tree)
            loss, _ = objective(part, [1.0] * len(part), outputs, version=Version(1), reference=None)
            loss.backward()
        model.zero_grad()

    return once


def in_its_own_type(once: Callable[[], None]) -> Callable[[], None]:
    """The same without float32 in the attention's backward."""

    def changed() -> None:
        few, kernels.FEW_KEYS = kernels.FEW_KEYS, 0
        once()
        kernels.FEW_KEYS = few

    return changed


def trained_stitched(model: PreTrainedModel, work: Workload) -> Callable[[], None]:
    """The same tokens, calls that continue one another as one row; a loss of the same cost."""

    def once() -> None:
        ids, marks = stitched(work.rows)
        lengths = torch.tensor([len(row) for row in ids]).numpy()
        for rows in plan_passes(lengths, TrainingSettings().max_tokens_per_forward):
            padded = pad([ids[i] for i in rows], [marks[i] for i in rows])
            logprobs = predict(model, padded, form=None).logprobs
            (-(logprobs + 6).exp().clamp(0.8, 1.28)).sum().backward()
        model.zero_grad()

    return once


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scale", type=float, default=0.1, help="of all lengths (default 0.1)")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    options.add_argument("--only", nargs="*", help="names of workloads (default: all)")
    options.add_argument(
        "--cpu-time", action="store_true", help="count this process's CPU time: for busy machines, with --threads 1"
    )
    chosen = options.parse_args()
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    torch.set_num_threads(chosen.threads)
    model = small_model(getattr(torch, chosen.dtype))
    shape = use_prefix_trees(model, "on")
    assert shape is not None, "trees were asked for"
    figures, lines, shares, worst = {}, [], [], []
    for work in workloads(chosen.scale):
        if chosen.only and work.name not in chosen.only:
            continue
        samples = as_samples(work.rows)
        contenders = {tree: trained(model, samples, tree, shape) for tree in ("auto", "on")}
        contenders["rows"] = trained(model, samples, "off", None)
        contenders["stitched"] = trained_stitched(model, work)
        if chosen.dtype == "bfloat16":
            contenders["own type"] = in_its_own_type(contenders["on"])
        contenders = {name: timed(contender, clock) for name, contender in contenders.items()}
        rates = interleaved_rates(contenders, chosen.repeats)
        ratio = {name: median_ratio(rates, name, "rows") for name in contenders}
        naive, least = work_of_rows(work.rows), work_of_tree(work.rows)
        sizes = {
            "linear_parameters": shape.linear_parameters,
            "num_layers": shape.num_layers,
            "attention_width": shape.attention_width,
        }
        bound = naive.operations(**sizes) / least.operations(**sizes)
        share = ratio["auto"] / bound
        figures[work.name] = ratio["auto"]
        if "own type" in rates:
            figures[f"own_type/{work.name}"] = median_ratio(rates, "on", "own type")
        worst.append(ratio["auto"])
        if bound >= HELPS:
            shares.append(share)
        lines.append(
            [
                work.name,
                f"{naive.tokens / least.tokens:.1f}",
                f"{bound:.1f}",
                f"{1e3 / statistics.median(rates['rows']):.0f} ms",
                *(f"{ratio[name]:.2f}" for name in ("auto", "on", "stitched")),
                f"{share:.2f}",
            ]
        )
    figures |= {"bound_share_min": min(shares, default=0.0), "worst": min(worst)}
    columns = ["workload", "tokens", "bound", "rows take", "auto", "tree", "stitched", "share of bound"]
    title = f"Times faster than one row per call; lengths x {chosen.scale:g}"
    report(title, columns, lines, figures, as_json=chosen.json, wanted=WANTED)


if __name__ == "__main__":
    main()
