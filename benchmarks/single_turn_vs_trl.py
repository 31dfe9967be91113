"""GRPO steps on one machine: flexmarl's whole loop against TRL's GRPOTrainer, same model, same work, one run.

    pip install -r requirements-bench.lock
    python benchmarks/single_turn_vs_trl.py --json

A step is 128 samples (16 prompts x 8) of exactly 40 tokens, one update, AdamW, no KL, on a Qwen3-type model of 0.8M
parameters that cannot produce its end token. flexmarl runs as `flexmarl train` does (`microbatch` mode), store, journal
and metrics included, in two worlds:

    one process   all samples decode together, then train together
    ray           engine, trainer and controller are processes; half of the samples decode while the other half trains

Steps of all are measured after two of warm-up, in interleaved rounds, each contender in a fresh process, as its users
have it: OpenMP's threads that one leaves in a process slow down the next. `samples_per_s_vs_trl` is the better world's.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec

import torch
import yaml
from character_model import save_character_model
from common import median_ratio, parser, report
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.metrics import read_metrics

P = ParamSpec("P")
PROMPTS, COPIES, TOKENS, WARM_UP = 16, 8, 40, 2
CODE = """
import random
from flexmarl.agents import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator

@task_generator("products")
def product(seed, index, split):
    rng = random.Random(f"{seed}/{split}/{index}")
    return Task(input_id=f"{split}-{index}", prompt=f"{rng.randint(10**4, 10**5)}*{rng.randint(10**4, 10**5)}")

@workflow("sevens")
async def sevens(task: Task, team: Team) -> None:
    reply = await team.solver.act(task.prompt)
    reply.reward(reply.text.count("7") / 40)
"""


def sevens(completions: list[Any], **_: Any) -> list[float | None]:
    """The reward of both: share of sevens. TRL would take a None, too: no reward of this function."""
    return [str(completion).count("7") / TOKENS for completion in completions]


@dataclass(frozen=True)
class World:
    """Where flexmarl's processes are, and how the work is cut for them."""

    backend: str
    threads: int
    """Of the trainer, and of all that is not decoding."""
    decoding: int
    """Threads of the engine. As a process beside the trainer's, one of so small a model is fastest on one."""
    slots: int
    """Samples that decode together, and that train together as soon as they are there."""


def worlds(threads: int) -> dict[str, World]:
    """The contenders that differ in nothing else."""
    samples = PROMPTS * COPIES
    return {
        "one process": World("inline", threads, threads, samples),
        "ray": World("ray", threads, 1, samples // 2),
    }


def flexmarl_steps(folder: Path, steps: int, world: World) -> list[float]:
    """Seconds of each measured step of a run."""
    engine = {"type": "embedded", "slots": world.slots, "max_len": 64, "threads": world.decoding}
    training = {"optimizer": {"learning_rate": 1e-3}, "micro_batch": world.slots}
    settings = {
        "name": "bench",
        "steps": steps + WARM_UP,
        "out": str(folder / "runs"),
        "code": ["team.py"],
        "cluster": {"backend": world.backend, "threads": world.threads},
        "tasks": {"type": "generator", "name": "products"},
        "policies": {"solver": {"model": "model", "engine": engine, "training": training}},
        "team": {
            "workflow": {"type": "custom", "name": "sevens"},
            "agents": {"solver": {"policy": "solver", "sampling": {"max_tokens": TOKENS}}},
        },
        "batch": {"groups": PROMPTS, "episodes": COPIES},
        "rollout": {"inter_query": PROMPTS, "intra_query": COPIES},
        "credit": {"estimator": {"type": "grpo"}, "filter": None},
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 0},
    }
    (folder / "team.py").write_text(CODE)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    run = assemble_run(load_run(folder / "run.yaml"))
    run.train(Console(quiet=True))
    values = read_metrics(run.folder / "metrics.jsonl")
    measured = [values[step] for step in sorted(values) if step > WARM_UP]
    expected = PROMPTS * COPIES * TOKENS
    wrong = [step["rollout/tokens"] for step in measured if step["rollout/tokens"] != expected]
    assert not wrong, f"a step sampled {wrong} tokens instead of {expected}"
    return [step["time/step_s"] for step in measured]


class StepTimer(TrainerCallback):
    """Notes when each step of TRL begins and ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Notes the time."""
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Notes the step's time."""
        self.seconds.append(time.perf_counter() - self._began)


def trl_steps(folder: Path, steps: int, threads: int) -> list[float]:
    """Seconds of each measured step of GRPOTrainer."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    rng = random.Random(0)
    prompts = [
        f"<|user|>{rng.randint(10**4, 10**5)}*{rng.randint(10**4, 10**5)}<|assistant|>"
        for _ in range(PROMPTS * (steps + WARM_UP))
    ]
    timer = StepTimer()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=sevens,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * COPIES,
            num_generations=COPIES,
            max_completion_length=TOKENS,
            max_steps=steps + WARM_UP,
            learning_rate=1e-3,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[timer],
    )
    trainer.train()
    sampled = trainer.state.num_input_tokens_seen
    assert sampled >= (steps + WARM_UP) * PROMPTS * COPIES * TOKENS, f"TRL saw only {sampled} tokens"
    return timer.seconds[WARM_UP:]


def apart(steps: Callable[P, list[float]], *args: P.args, **kwargs: P.kwargs) -> float:
    """Samples per second of the median step, taken in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return PROMPTS * COPIES / statistics.median(process.submit(steps, *args, **kwargs).result())


def main() -> None:
    """Runs both, prints the table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=8, help="measured steps per round and contender (default 8)")
    chosen = options.parse_args()
    samples = PROMPTS * COPIES
    contenders = worlds(chosen.threads)
    rates: dict[str, list[float]] = {name: [] for name in (*contenders, "TRL")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_character_model(folder / "model")
        for _ in range(chosen.repeats):
            for world in contenders:
                rates[world].append(apart(flexmarl_steps, folder, chosen.steps, contenders[world]))
            rates["TRL"].append(apart(trl_steps, folder, chosen.steps, chosen.threads))
    one_process, ray = (median_ratio(rates, world, "TRL") for world in contenders)
    report(
        f"GRPO steps of {samples} samples x {TOKENS} tokens, {chosen.repeats} rounds of {chosen.steps} steps",
        ["", "samples/s (median)", "slowest round", "fastest round"],
        [[name, *(f"{f(values):.0f}" for f in (statistics.median, min, max))] for name, values in rates.items()],
        {"samples_per_s_vs_trl": max(one_process, ray), "one_process_vs_trl": one_process, "ray_vs_trl": ray},
        as_json=chosen.json,
        wanted={"samples_per_s_vs_trl": 1.0},
    )


if __name__ == "__main__":
    main()
