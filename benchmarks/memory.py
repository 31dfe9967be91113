"""Peak memory of whole runs of a model with 135 million parameters, by what `flexmarl check` predicts.

    python benchmarks/memory.py --json

The model has the shape of SmolLM2-135M and random weights, so every reply has all its tokens. Each run is `flexmarl
train` in a process of its own, whose resident memory, with that of its children, is read every 20 ms. `ratio_full`,
`ratio_lora`: the peak by the prediction, all weights trained, or an adapter of rank 8. `peak_gib`: the peak of a run of
two policies with `max_len` 8192 and replies of 100 tokens.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from common import config_of_135m, parser, report
from transformers import AutoTokenizer, LlamaForCausalLM

from flexmarl.events.machine import GIB

SEED_MODEL = Path(__file__).parents[1] / "examples" / "math_team" / "seed_model"
EVERY_S = 0.02
FLEXMARL = (sys.executable, "-c", "from flexmarl.cli import main; main()")
CODE = """
from random import random

from flexmarl.agents import workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator


@task_generator("counts")
def counts(seed, index, split):
    return Task(input_id=f"{split}-{index}", prompt=f"{index} + 1", reference=str(index))


@workflow("each")
async def each(task, team):
    for seat in team:
        await seat.act(task.prompt)
        seat.reward(random())  # the replies of random weights say nothing, but their rows must be trained
"""
CONFIG = """
name: memory
seed: 1
steps: 3
code: [tasks.py]
cluster: {{backend: inline, threads: {threads}}}
tasks: {{type: generator, name: counts}}
policies:
  solver: &policy
    model: model
    engine: {{type: embedded, slots: 8, max_len: {max_len}, kept_prefixes: 0}}
    training:
      micro_batch: 16
      max_tokens_per_forward: 1024
      optimizer: {{learning_rate: 1e-6}}
      {training}
  {second}
team:
  workflow: {{type: custom, name: each}}
  agents:
    solver: {{policy: solver, system: solve, sampling: {{max_tokens: 100}}}}
    {judge}
batch: {{groups: 4, episodes: 4}}
rollout: {{inter_query: 4, intra_query: 4, episode_timeout_s: 3600}}
evaluate: {{tasks: 0}}
checkpoint: {{every: 1, keep: 1}}
"""


def write_model(folder: Path) -> None:
    """Writes the model, and a tokenizer of few tokens."""
    torch.manual_seed(0)
    config = config_of_135m(max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SEED_MODEL).save_pretrained(folder)


def write_run(folder: Path, *, threads: int, max_len: int = 160, training: str = "", two: bool = False) -> Path:
    """Writes the config of a run; returns its path."""
    (folder / "tasks.py").write_text(CODE)
    text = CONFIG.format(
        threads=threads,
        max_len=max_len,
        training=training,
        second="judge: *policy" if two else "",
        judge="judge: {policy: judge, system: judge, sampling: {max_tokens: 100}}" if two else "",
    )
    config = folder / "run.yaml"
    config.write_text(text)
    return config


def predicted(config: Path) -> float:
    """GiB that `flexmarl check` predicts."""
    found = subprocess.run([*FLEXMARL, "check", str(config)], capture_output=True, text=True, env=_wide())
    numbers = re.findall(r"([\d.]+) GiB at the peak", found.stdout)
    if not numbers:
        raise RuntimeError(f"check predicts no memory:\n{found.stdout}\n{found.stderr}")
    return float(numbers[0])


def measured(config: Path) -> float:
    """GiB of resident memory at the peak of a run, over all its processes."""
    command = [*FLEXMARL, "train", str(config)]
    peak, log = 0, config.parent / "log.txt"
    with log.open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, env=_wide())
        watched = psutil.Process(run.pid)
        while run.poll() is None:
            peak = max(peak, _resident(watched))
            time.sleep(EVERY_S)
    if run.returncode:
        raise RuntimeError(f"the run ended with {run.returncode}:\n{log.read_text()[-4000:]}")
    return peak / GIB


def _resident(process: psutil.Process) -> int:
    """Bytes of resident memory, pages that map a file included."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total += one.memory_info().rss
    return total


def _wide() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "400", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--only", nargs="*", choices=("full", "lora", "two"), default=("full", "lora", "two"))
    chosen = options.parse_args()
    rows, figures = list[Sequence[str]](), dict[str, float]()
    lora = "lora: {rank: 8}"
    runs = {"full": {}, "lora": {"training": lora}, "two": {"training": lora, "max_len": 8192, "two": True}}
    with tempfile.TemporaryDirectory(prefix="flexmarl-memory-") as folder:
        write_model(Path(folder) / "model")
        for name in chosen.only:
            config = write_run(Path(folder), threads=chosen.threads, **runs[name])
            said, peak = predicted(config), measured(config)
            rows.append((name, f"{peak:.2f}", f"{said:.2f}"))
            figures |= {"peak_gib": peak} if name == "two" else {f"ratio_{name}": peak / said}
    report(
        "Peak memory of a run, 135M parameters",
        ("run", "GiB measured", "GiB predicted"),
        rows,
        figures,
        as_json=chosen.json,
        wanted={"ratio_full": 0.85, "ratio_lora": 0.85},
        wanted_at_most={"ratio_full": 1.15, "ratio_lora": 1.15, "peak_gib": 7.0},
    )


if __name__ == "__main__":
    main()
