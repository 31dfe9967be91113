"""What all benchmarks share: interleaved repeats, a table, machine facts, and the JSON line at the end."""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

Number = int | float


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has: `--json`, `--repeats`, `--threads`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    options.add_argument("--repeats", type=int, default=5, help="interleaved runs of each contender (default 5)")
    options.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    return options


def tiny_model(vocabulary: int) -> Qwen3ForCausalLM:
    """The model of all benchmarks: Qwen3-type, 0.8M parameters, random weights, no end token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def config_of_135m(**more: Any) -> LlamaConfig:
    """The shape of SmolLM2-135M, with what else is wanted of the config."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        **more,
    )


def interleaved(contenders: Mapping[str, Callable[[], Number]], repeats: int) -> dict[str, list[float]]:
    """Runs the contenders in turn, `repeats` times after one warm-up each; returns work done per second of each run.

    A contender returns how much it has done. In turn, so that a noisy neighbour disturbs all of them alike.
    """

    def rate(contender: Callable[[], Number]) -> float:
        began = time.perf_counter()
        done = contender()
        return done / (time.perf_counter() - began)

    return interleaved_rates({name: partial(rate, contender) for name, contender in contenders.items()}, repeats)


def interleaved_rates(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """The same for contenders that hold the clock themselves: each returns its work per second."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            rate = contender()
            if repeat:
                rates[name].append(rate)
    return rates


def median_ratio(rates: Mapping[str, Sequence[float]], ours: str, theirs: str) -> float:
    """Median over repeats of our rate by theirs in the same repeat."""
    return statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))


def machine() -> dict[str, Number | str]:
    """Where the figures were measured."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
    *,
    as_json: bool,
    wanted: Mapping[str, float] | None = None,
    wanted_at_most: Mapping[str, float] | None = None,
) -> None:
    """Prints the table, the figures with what is wanted of them, and with `--json` the machine-readable last line."""
    console = Console()
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in figures.items():
        least, most = (wanted or {}).get(name), (wanted_at_most or {}).get(name)
        verdict = "" if least is None else f"   wanted >= {least:g}: {'yes' if value >= least else 'NO'}"
        verdict += "" if most is None else f"   wanted <= {most:g}: {'yes' if value <= most else 'NO'}"
        console.print(f"{name} = {value:.2f}{verdict}", highlight=False)
    if as_json:
        print(json_line(figures))


def json_line(figures: Mapping[str, float]) -> str:
    """The figures, to three decimals, and the machine as one line of strict JSON. A figure that is not finite is null.

    >>> json.loads(json_line({"speed": 1.23456, "ratio": math.nan}))["figures"]
    {'speed': 1.235, 'ratio': None}
    """
    rounded = {name: round(value, 3) if math.isfinite(value) else None for name, value in figures.items()}
    return json.dumps({"figures": rounded, "machine": machine()}, allow_nan=False)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
