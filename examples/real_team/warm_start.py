"""Teaches SmolLM2 the form of calls, answers and verdicts, by supervised training on a few hundred demonstrations.

    python -m examples.real_team.warm_start [base_model [warm_model]]

Nothing is done if the folder `warm_model` is there. The same kind of machine gives the same model for one number of
threads. It trains in bfloat16 where the CPU multiplies that, else in float32; the saved weights are bfloat16.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from examples.real_team.demonstrations import Message, demonstration
from examples.real_team.model import BASE_MODEL, save
from flexmarl.cluster.torch_device import cpu_multiplies_bfloat16
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.supervised import Demonstration, num_updates, train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

WARM_MODEL = Path(__file__).parent / "warm_model"
SEED = 0
DEMONSTRATIONS = 512
BATCH = 8
"""Small, because a batch holds demonstrations of one length, and so mostly of one kind: kinds alternate sooner."""
LEARNING_RATE = 2e-4


def main(base: Path = BASE_MODEL, folder: Path = WARM_MODEL) -> None:
    """Trains all weights for one epoch and saves the model."""
    if (folder / "config.json").is_file():
        print(f"{folder} is there")
        return
    dtype = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    tokenizer, model, rng = AutoTokenizer.from_pretrained(base), load_model(base, dtype), random.Random(SEED)
    rows = [encode(tokenizer, demonstration(rng)) for _ in range(DEMONSTRATIONS)]
    updates = num_updates(rows, SupervisedSettings(batch=BATCH))
    settings = SupervisedSettings(
        batch=BATCH,
        optimizer=AdamWSettings(learning_rate=LEARNING_RATE, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=5, decay_steps=updates, min_ratio=0.05),
        max_tokens_per_forward=2048,
    )

    def progress(update: int, loss: float) -> None:
        if update % 10 == 0:
            print(f"warm start {update}/{updates}: loss {loss:.3f}", flush=True)

    train_supervised(model, rows, settings, seed=SEED, progress=progress)
    save(tokenizer, model.bfloat16(), folder)


def encode(tokenizer: Any, messages: Sequence[Message]) -> Demonstration:
    """Ids as the run's chat renderer makes them; trained are those that the assistant samples, end of turn included."""
    ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    for index, said in enumerate(messages):
        if said["role"] == "assistant":
            start = len(tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False))
            length = len(tokenizer.encode(said["content"], add_special_tokens=False))
            trained[start : start + length + 1] = True
    return Demonstration(ids=ids, trained=trained)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
