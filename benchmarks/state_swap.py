"""Swaps of training state between a rank and blocks of shared memory, against copying the same tensors.

    python benchmarks/state_swap.py --json              1M and 100M parameters
    python benchmarks/state_swap.py --sizes 500 --json  500M: 8 GB of state, twice
    python benchmarks/state_swap.py --hidden --json     swaps of a run: examples/store_assistant on two places

One policy in float32, all weights trained, with gradient sums and both moments: 16 bytes per parameter. It is suspended
and resumed again and again, on blocks that exist after the first time. Seconds, medians:

    suspend, resume    as `Rank` does them
    memcpy             of the state's tensors into tensors that exist
    control            what is left of a swap without its data: the same swap of the same layers, one number wide

The weights are published before: their block is the object that engines load, and is not written again.

    swap_hidden        share of the seconds of a run's swaps in which a rollout or another policy's training goes on;
                       eight policies train for real, their engines are timed (timed.yaml)
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import parser, report
from rich.console import Console
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    MicroBatch,
    PolicyName,
    Sample,
    Turn,
    Version,
    VersionRun,
)
from flexmarl.records.ids import make_sample_id
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.rank import RankHost, Trained
from flexmarl.training.backends.ranks import Ranks
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import HeldRows
from flexmarl.training.settings import TrainingSettings

SOLVER = PolicyName("solver")
WIDTHS = {1: 64, 100: 704, 500: 1600}
"""Width of a model of 12 layers with about so many million parameters."""
LAYERS = 12
SETTINGS = TrainingSettings()
CONFIG = Path(__file__).parents[1] / "examples" / "store_assistant" / "timed.yaml"
PLACES = 2
WANTED = {"swap_hidden": 0.9}
WANTED_AT_MOST = {"resume_control_s": 0.25, "suspend_control_s": 0.1, "data_vs_memcpy": 1.5}


def model_of(width: int) -> Qwen3ForCausalLM:
    """A model of random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def sample_of(number: int, version: int) -> Sample:
    """One short row."""
    logprobs = np.full(4, -2.0, dtype=np.float32)
    turn = Turn(
        sample_id=make_sample_id("task", 0, f"g0e{number}a0"),
        episode=EpisodeId(f"g0e{number}a0"),
        agent=AgentName("solver"),
        policy=SOLVER,
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.arange(4, dtype=np.int32),
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=(VersionRun(0, Version(version)),),
        finish=FinishReason.STOP,
    )
    return Sample(turn=turn, advantage=1.0, weight=1.0, episode_tokens=4)


async def swaps(folder: Path, source: Path, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of `suspend`, `resume` and `memcpy`, the bytes of the state, and those left on a CUDA device.

    From a device, `memcpy` copies into pinned memory.
    """
    objects, rows = ShmObjectStore(folder), HeldRows()
    objects.create()

    def make(policy: PolicyName, model: PreTrainedModel, ranks: Ranks) -> SingleProcessTrainer:
        return SingleProcessTrainer(policy, model, SETTINGS, objects, rows=rows, ranks=ranks, device=device)

    on_cuda = device.startswith("cuda")
    rank = RankHost({SOLVER: Trained(source=source, settings=SETTINGS)}, objects, make, device=device)
    await rank.resume(SOLVER, None)
    for version in range(2):  # The second one leaves its gradient sums.
        samples = [sample_of(2 * version + number, version) for number in range(2)]
        rows.hold(samples)
        batch = MicroBatch(micro_batch_id=f"{version}", policy=SOLVER, samples=tuple(samples))
        await rank.accumulate(batch.micro_batch_id, [s.turn.sample_id for s in samples])
        if version == 0:
            await rank.step(divisors_of(samples))
            await rank.publish(Version(1))
    state = await rank._held().state()
    tensors = [tensor for of in state.tensors.values() for tensor in of.values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    copies, memcpy = [torch.zeros_like(tensor, device="cpu", pin_memory=on_cuda) for tensor in tensors], []
    for _ in range(repeats):
        began = time.perf_counter()
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if on_cuda:
            torch.cuda.synchronize(device)
        memcpy.append(time.perf_counter() - began)
    del state, tensors, copies
    gc.collect()
    gc.freeze()  # As in the process of a rank: what torch and transformers loaded is not looked at again.
    suspends, resumes = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        aside = await rank.suspend()
        suspends.append(time.perf_counter() - began)
        began = time.perf_counter()
        await rank.resume(SOLVER, aside)
        resumes.append(time.perf_counter() - began)
    await rank.suspend()
    if on_cuda:  # Of each thread that has multiplied: they belong to the process, as its context does.
        torch._C._cuda_clearCublasWorkspaces()
    median = statistics.median
    return {
        "suspend": median(suspends[1:]),
        "resume": median(resumes[1:]),
        "memcpy": median(memcpy),
        "bytes": num_bytes,
        "bytes_left": torch.cuda.memory_allocated(device) if on_cuda else 0,
    }


def measured(width: int, repeats: int, device: str = "cpu") -> dict[str, float]:
    """The figures of a model of this width."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory(dir=memory) as blocks:
        model = model_of(width)
        model.save_pretrained(files)
        parameters = model.num_parameters()
        del model
        found = asyncio.run(swaps(Path(blocks) / "blocks", Path(files), repeats, device))
    return {**found, "parameters": parameters}


def hidden(facts: Facts) -> tuple[float, float, int]:
    """Seconds of the swaps inside steps, those of them that are hidden, and the number of swaps."""
    total, covered = 0.0, 0.0
    swaps = [swap for swap in facts.swaps if any(began <= swap.began <= ended for began, ended in facts.span)]
    for swap in swaps:
        others = [
            (done.began, done.ended) for done in (*facts.micro_batches, *facts.updates) if done.policy != swap.policy
        ]
        at = swap.began
        for began, ended in sorted([*facts.rollouts, *others]):
            if ended > at and began < swap.ended:
                covered += min(ended, swap.ended) - max(began, at)
                at = min(ended, swap.ended)
        total += swap.ended - swap.began
    return total, covered, len(swaps)


def play_hidden(steps: int, *, as_json: bool) -> None:
    """Trains, prints the table."""
    with tempfile.TemporaryDirectory() as out:
        places = f"process_groups={{at_once: {PLACES}}}"
        words = [f"out={out}", f"steps={steps}", "cluster.backend=ray", "cluster.threads=1", "evaluate.tasks=0", places]
        run = assemble_run(load_run(CONFIG, words))
        run.train(Console(quiet=True))
        facts = read_facts(read_run(RunFolder(run.folder).journal))
    total, covered, number = hidden(facts)
    report(
        f"Swaps of {steps} steps of store_assistant, eight policies on {PLACES} places",
        ["swaps", "seconds", "hidden, s", "seconds of all steps"],
        [[f"{number}", f"{total:.2f}", f"{covered:.2f}", f"{sum(ended - began for began, ended in facts.span):.1f}"]],
        {"swap_hidden": covered / total},
        as_json=as_json,
        wanted=WANTED,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[1, 100], choices=sorted(WIDTHS), help="millions")
    options.add_argument("--hidden", action="store_true", help="swaps of a run, and how much of them is hidden")
    options.add_argument("--steps", type=int, default=6, help="steps of that run (default 6)")
    chosen = options.parse_args(words)
    if chosen.hidden:
        play_hidden(chosen.steps, as_json=chosen.json)
        return
    torch.set_num_threads(chosen.threads)
    transformers_logging.disable_progress_bar()
    control = measured(32, chosen.repeats)
    sizes = {size: measured(WIDTHS[size], chosen.repeats) for size in chosen.sizes}
    rows = [
        [
            f"{of['parameters'] / 1e6:.1f}M",
            f"{of['bytes'] / 1e6:.0f} MB",
            *(f"{of[name]:.3f} s" for name in ("suspend", "resume", "memcpy")),
            *(f"{(of[name] - control[name]) / of['memcpy']:.2f}" for name in ("suspend", "resume")),
        ]
        for of in (control, *sizes.values())
    ]
    largest = sizes[max(sizes)]
    data_s = sum(largest[name] - control[name] for name in ("suspend", "resume"))
    report(
        "Swaps of training state",
        ["parameters", "state", "suspend", "resume", "memcpy", "suspend data/memcpy", "resume data/memcpy"],
        rows,
        {
            "suspend_control_s": control["suspend"],
            "resume_control_s": control["resume"],
            "data_vs_memcpy": data_s / (2 * largest["memcpy"]),
        },
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
