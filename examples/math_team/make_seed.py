"""Makes the seed model of the math team, by supervised cold start, and prints what it can do.

    python -m examples.math_team.make_seed [folder]

About five minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.demonstrations import COMPARING, COPYING, HABITS, JUDGING, TABLE, Habits, Message, demonstration
from examples.math_team.properties import properties
from examples.math_team.tokenizer import END, PAD, build_tokenizer
from flexmarl.training.backends.supervised import Demonstration, num_updates, train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

SEED_MODEL = Path(__file__).parent / "seed_model"
SEED = 0
BATCH = 32


class Stage(NamedTuple):
    """What is demonstrated, how often, and how fast it is learned."""

    habits: Habits
    updates: int
    learning_rate: float


STAGES = {
    "copying": Stage(COPYING, 400, 3e-3),
    "table": Stage(TABLE, 400, 3e-3),
    "comparing": Stage(COMPARING, 800, 3e-3),
    "judging": Stage(JUDGING, 500, 2e-3),
    "habits": Stage(HABITS, 600, 7e-4),
}


def main(folder: Path = SEED_MODEL) -> None:
    """Trains stage by stage, saves tokenizer and model, prints the table."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    for name, stage in STAGES.items():
        rows = [encode(tokenizer, demonstration(rng, stage.habits)) for _ in range(stage.updates * BATCH)]
        train(name, model, rows, stage.learning_rate)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    for what, share in properties(model.eval(), tokenizer, random.Random(SEED + 1)):
        print(f"{what:<50} {share:.3f}")


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int = 160, inner: int = 384, positions: int = 256
) -> Qwen3ForCausalLM:
    """Qwen3 with three layers: where one is in the text, the digit to copy or compare, the decision."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=positions,
        # Small, because texts are short: more of a head's dimensions tell neighbours apart.
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Demonstration:
    """Ids as the run's chat renderer makes them; trained are those that the assistant samples."""
    ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False))
            # Generation stops at the `)` of a call: what ends that message is not sampled.
            calls = index + 1 < len(messages)
            trained[start : start + len(message["content"]) + (not calls)] = True
    return Demonstration(ids=ids, trained=trained)


def cold_start(
    folder: str | Path, demonstration: Callable[[random.Random], list[Message]], *, updates: int, positions: int
) -> None:
    """Trains a smaller model on one kind of demonstrations, saves tokenizer and model, prints the loss."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model = build_model(tokenizer, hidden=128, inner=256, positions=positions)
    print(f"{model.num_parameters():,} parameters")
    train("form", model, [encode(tokenizer, demonstration(rng)) for _ in range(updates * BATCH)], 3e-3)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def train(name: str, model: PreTrainedModel, rows: Sequence[Demonstration], rate: float) -> None:
    """Trains one stage."""
    updates = num_updates(rows, SupervisedSettings(batch=BATCH))
    settings = SupervisedSettings(
        batch=BATCH,
        optimizer=AdamWSettings(learning_rate=rate, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=50, decay_steps=updates, min_ratio=0.05),
    )
    start = perf_counter()

    def progress(update: int, loss: float) -> None:
        if update % 100 == 0:
            print(f"{name} {update}/{updates}: loss {loss:.3f}, {perf_counter() - start:.0f} s", flush=True)

    train_supervised(model, rows, settings, seed=SEED, progress=progress)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
