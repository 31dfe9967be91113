"""Threads that sleep while they wait for each other, as in processes of ray, or spin briefly first, as inline, or spin.

    python benchmarks/shared_cores.py --json

Forward and backward passes of a Qwen3-type model of 0.8M parameters with as many threads as cores, alone on the machine
and beside a process that multiplies matrices on one thread, as an engine does beside a trainer, or beside more of them
(`--others`). Each measurement is a process of its own; all come in turn. Spinning is OpenMP's default.

    alone_vs_spinning          seconds of a pass alone: asleep by spinning
    beside_vs_spinning         the same beside the other process
    other_vs_spinning          products per second of the other process: asleep by spinning
    brief_alone_vs_spinning    seconds of a pass alone: spinning briefly by spinning
    brief_beside_vs_spinning   the same beside the other process
"""

import math
import os
import select
import statistics
import subprocess
import sys
import time

import torch
from common import median_ratio, parser, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from flexmarl.__main__ import BRIEF_SPIN

POLICIES = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spinning briefly": {"GOMP_SPINCOUNT": BRIEF_SPIN},
    "spinning": {},
}
WAYS = {f"{policy}, {where}": (policy, where) for policy in POLICIES for where in ("alone", "beside")}
CHOSEN = {name for policy in POLICIES.values() for name in policy}
MEASURED_S, UNTIL_READY = 8.0, "ready"
"""Seconds that are measured at a time, and what a process prints before."""


def passes(threads: int) -> float:
    """Seconds of a pass: the median of those of MEASURED_S."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            tie_word_embeddings=True,
        )
    )
    ids = torch.randint(0, 96, (16, 128))
    taken: list[float] = []
    while not taken or sum(taken) < MEASURED_S:
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def products() -> None:
    """Multiplies matrices on one thread until its input ends; prints how many a second."""
    torch.set_num_threads(1)
    matrix, number = torch.randn(700, 700), 0
    print(UNTIL_READY, flush=True)
    began = time.perf_counter()
    while not select.select([sys.stdin], [], [], 0)[0]:
        torch.mm(matrix, matrix)
        number += 1
    print(number / (time.perf_counter() - began))


def started(policy: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts this script as one of the two processes."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={name: value for name, value in os.environ.items() if name not in CHOSEN} | POLICIES[policy],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measured(policy: str, where: str, threads: int, others: int) -> tuple[float, float]:
    """Seconds of a pass, and products per second of each other process; NaN if there is none."""
    beside = [started(policy, "--as", "products") for _ in range(others if where == "beside" else 0)]
    for other in beside:
        assert other.stdout is not None
        other.stdout.readline()
    seconds, _ = started(policy, "--as", "passes", "--threads", str(threads)).communicate()
    rates = [float(other.communicate()[0]) for other in beside]
    return float(seconds), statistics.fmean(rates) if rates else math.nan


def compare(threads: int, repeats: int, others: int, *, as_json: bool) -> None:
    """Prints the table."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, (policy, where) in WAYS.items():
            took, rate = measured(policy, where, threads, others)
            seconds[way].append(took)
            rates[way].append(rate)
    report(
        f"Passes on {threads} threads",
        ("", "ms of a pass", "products/s of the other process"),
        [(way, f"{statistics.median(seconds[way]) * 1e3:.0f}", f"{statistics.median(rates[way]):.0f}") for way in WAYS],
        {
            "alone_vs_spinning": median_ratio(seconds, "asleep, alone", "spinning, alone"),
            "beside_vs_spinning": median_ratio(seconds, "asleep, beside", "spinning, beside"),
            "other_vs_spinning": median_ratio(rates, "asleep, beside", "spinning, beside"),
            "brief_alone_vs_spinning": median_ratio(seconds, "spinning briefly, alone", "spinning, alone"),
            "brief_beside_vs_spinning": median_ratio(seconds, "spinning briefly, beside", "spinning, beside"),
        },
        as_json=as_json,
    )


def main() -> None:
    """Runs one of the two processes, or both in turn."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.set_defaults(threads=os.cpu_count(), repeats=3)
    options.add_argument("--as", dest="part", choices=("passes", "products"), help="run one of the two processes")
    options.add_argument("--others", type=int, default=1, help="processes that multiply matrices (default 1)")
    chosen = options.parse_args()
    if chosen.part == "passes":
        print(passes(chosen.threads))
    elif chosen.part == "products":
        products()
    else:
        compare(chosen.threads, chosen.repeats, chosen.others, as_json=chosen.json)


if __name__ == "__main__":
    main()
