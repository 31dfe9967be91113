"""A real pretrained model of 135M parameters: our engine against static `generate`, our GRPO steps against TRL's.

    pip install -r requirements-bench.lock
    make model
    python benchmarks/real_model.py --json

Everything is per second of CPU time, of one process with one thread and with two, so that what else the machine does
matters little. The contenders have the same model in float32, the same prompts ("What is 7 plus 5?" in its chat
template) and at most 16 tokens for a reply, sampled at temperature 1; a reply ends where the model ends it.

    generate   64 replies to 8 prompts, 8 each, as a group has them; static `generate` gets them as one batch; useful
               tokens: up to the end of each reply
    grpo       steps of 64 samples (8 prompts, 8 each), one update of AdamW, no KL; all weights, or an adapter of rank
               16 on every linear layer. Ours runs as `flexmarl train` does, store, journal and metrics included.

One round of each contender in turn; the first step of a run, and the first batch of `generate`, is not measured.
Each figure is the lower of the two numbers of threads, and `grpo_vs_trl` the lower of `grpo_full` and `grpo_lora`.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from common import parser, report
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import flexmarl
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import ConfigError
from flexmarl.events.run_events import StepEnded, StepStarted
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.interface import answers_of
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import GenerationRequest, PolicyName, Sampling
from flexmarl.training.backends.causal_lm import load_model

MODEL = Path(__file__).parents[1] / "examples" / "real_team" / "base_model"
PROMPTS, COPIES, TOKENS, WARM_UP = 8, 8, 16, 1
RATE, RANK, ALPHA = 1e-5, 16, 32
POLICY = PolicyName("solver")
WANTED = {"generate_vs_static": 2.0, "grpo_vs_trl": 3.0}
CODE = """
import random
from flexmarl.agents import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator

@task_generator("additions")
def addition(seed, index, split):
    rng = random.Random(f"{seed}/{split}/{index}")
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return Task(input_id=f"{split}-{index}", prompt=f"What is {a} plus {b}?", reference=str(a + b))

@workflow("answer")
async def answer(task: Task, team: Team) -> None:
    reply = await team.solver.act(task.prompt)
    reply.reward(float(task.reference in reply.text))
"""


def questions(number: int) -> list[tuple[str, str]]:
    """Questions with their answers."""
    rng = random.Random(0)
    pairs = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(number)]
    return [(f"What is {a} plus {b}?", str(a + b)) for a, b in pairs]


class Replies:
    """Two ways to 64 replies. Each call returns useful tokens per second of CPU time."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._thread = DeviceThread("bench")
        self._engine = EmbeddedEngine(
            lambda: load_model(model),
            EmbeddedSettings(slots=PROMPTS * COPIES, max_len=128),
            policy=POLICY,
            store=InlineObjectStore(),
            thread=self._thread,
        )
        self._prompts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
            )
            for asked, _ in questions(PROMPTS)
            for _ in range(COPIES)
        ]
        self._round = 0

    @torch.inference_mode()
    def static(self) -> float:
        """One padded batch, as `generate` takes it."""
        batch = self._tokenizer.pad({"input_ids": self._prompts}, return_tensors="pt")
        began = time.process_time()
        out = self._model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS
        )
        seconds = time.process_time() - began
        ended = out[:, batch["input_ids"].shape[1] :] == self._tokenizer.eos_token_id
        useful = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1] - batch["input_ids"].shape[1])
        return int(useful.sum()) / seconds

    async def engine(self) -> float:
        """Our engine, behind its interface and its thread, with log-probabilities of both kinds."""
        self._round += 1
        requests = [
            GenerationRequest(
                request_id=f"{self._round}/{index}",
                policy=POLICY,
                prompt_ids=np.array(prompt, dtype=np.int32),
                sampling=Sampling(max_tokens=TOKENS, stop_ids=(self._tokenizer.eos_token_id,)),
                seed=1000 * self._round + index,
            )
            for index, prompt in enumerate(self._prompts)
        ]
        began = time.process_time()
        done = [generation async for generation in answers_of(self._engine, requests)]
        return sum(len(generation.response_ids) for generation in done) / (time.process_time() - began)

    async def close(self) -> None:
        """Ends the engine's thread."""
        await self._engine.close()
        self._thread.close()


def flexmarl_steps(model: Path, folder: Path, threads: int, steps: int, *, lora: bool) -> float:
    """Samples per second of CPU time, of the median measured step of a run."""
    training = {
        "optimizer": {"learning_rate": RATE},
        "micro_batch": PROMPTS * COPIES,
        "lora": {"rank": RANK, "alpha": ALPHA} if lora else None,
    }
    settings = {
        "name": "bench",
        "steps": steps + WARM_UP,
        "out": str(folder / "runs"),
        "code": ["team.py"],
        "cluster": {"backend": "inline", "threads": threads},
        "tasks": {"type": "generator", "name": "additions"},
        "policies": {
            "solver": {
                "model": str(model),
                "engine": {"type": "embedded", "slots": PROMPTS * COPIES, "max_len": 128},
                "training": training,
            }
        },
        "team": {
            "workflow": {"type": "custom", "name": "answer"},
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
    began: list[float] = []
    ended: list[float] = []
    flexmarl.train(
        flexmarl.load(folder / "run.yaml"),
        on={
            StepStarted: lambda _: began.append(time.process_time()),
            StepEnded: lambda _: ended.append(time.process_time()),
        },
        show=False,
    )
    return _samples_per_second(began, ended)


class StepClock(TrainerCallback):
    """Notes CPU time where each step of TRL begins and ends."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Notes the CPU time."""
        self.began.append(time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Notes the CPU time."""
        self.ended.append(time.process_time())


def right_sum(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """The reward of both: 1 if the reply has the sum."""
    return [float(right in said[0]["content"]) for said, right in zip(completions, answer, strict=True)]


def trl_steps(model: Path, folder: Path, threads: int, steps: int, *, lora: bool) -> float:
    """Samples per second of CPU time, of GRPOTrainer's median measured step."""
    torch.set_num_threads(threads)
    asked = questions(PROMPTS * (steps + WARM_UP))
    clock = StepClock()
    GRPOTrainer(
        model=str(model),
        reward_funcs=right_sum,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * COPIES,
            num_generations=COPIES,
            max_completion_length=TOKENS,
            max_steps=steps + WARM_UP,
            learning_rate=RATE,
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
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in asked]
        ),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[clock],
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear") if lora else None,
    ).train()
    return _samples_per_second(clock.began, clock.ended)


def _samples_per_second(began: list[float], ended: list[float]) -> float:
    seconds = [end - begin for begin, end in zip(began, ended, strict=True)][WARM_UP:]
    return PROMPTS * COPIES / statistics.median(seconds)


def generated(model: Path, threads: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of CPU time, of rounds in turn after one that is not measured."""
    torch.set_num_threads(threads)
    found: dict[str, list[float]] = {"engine": [], "static generate": []}
    with asyncio.Runner() as loop:
        replies = Replies(model)
        for repeat in range(repeats + 1):
            for name, rate in (("engine", loop.run(replies.engine())), ("static generate", replies.static())):
                found[name] += [rate] if repeat else []
        loop.run(replies.close())
    return found


def trained(model: Path, folder: Path, threads: int, repeats: int, steps: int, *, lora: bool) -> dict[str, list[float]]:
    """Samples per second of CPU time, of runs in turn."""
    found: dict[str, list[float]] = {"flexmarl": [], "TRL": []}
    contenders: dict[str, Callable[..., float]] = {"flexmarl": flexmarl_steps, "TRL": trl_steps}
    for _ in range(repeats):
        for name, contender in contenders.items():
            found[name].append(contender(model, folder, threads, steps, lora=lora))
    return found


def main() -> None:
    """Runs all pairs with one thread and with two; prints the table."""
    options = parser(__doc__)
    options.set_defaults(repeats=1)
    options.add_argument(
        "--model", type=Path, default=MODEL, help="folder of the model (default: that of `make model`)"
    )
    options.add_argument("--steps", type=int, default=3, help="measured steps of a run (default 3)")
    chosen = options.parse_args()
    if not (chosen.model / "config.json").is_file():
        raise ConfigError(f"--model: '{chosen.model}' holds no model; `make model` makes it, or give another folder")
    logging.set_verbosity_error()
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for threads in range(1, chosen.threads + 1):
            part = partial(trained, chosen.model, Path(name), threads, chosen.repeats, chosen.steps)
            pairs: dict[str, Callable[[], dict[str, list[float]]]] = {
                "generate": partial(generated, chosen.model, threads, chosen.repeats),
                "grpo_full": partial(part, lora=False),
                "grpo_lora": partial(part, lora=True),
            }
            for kind, measure in pairs.items():
                rates = measure()
                (_, ours), (_, theirs) = rates.items()
                ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                ratios.setdefault(kind, []).append(ratio)
                unit = "tokens" if kind == "generate" else "samples"
                for contender, of in rates.items():
                    rows.append(
                        [f"{kind}, {threads} threads, {contender}", f"{statistics.median(of):.2f} {unit}/CPU s"]
                    )
    lowest = {kind: min(of) for kind, of in ratios.items()}
    figures = {
        "generate_vs_static": lowest.pop("generate"),
        "grpo_vs_trl": min(lowest.values()),
        **lowest,
    }
    report(
        f"135M parameters, float32, {PROMPTS * COPIES} replies of at most {TOKENS} tokens, {chosen.repeats} rounds",
        ["", "median"],
        rows,
        figures,
        as_json=chosen.json,
        wanted=WANTED,
    )


if __name__ == "__main__":
    main()
