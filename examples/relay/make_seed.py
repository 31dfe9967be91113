"""Makes the seed model of the relay, by supervised cold start, and prints what agents with its habits achieve.

    python -m examples.relay.make_seed [folder] [strength of the habits]

Half a minute on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.tokenizer import END, PAD, build_tokenizer
from examples.relay.demonstrations import Habits, Message
from examples.relay.tasks import THINGS
from flexmarl.training.backends.supervised import Demonstration, train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

SEED_MODEL = Path(__file__).parent / "seed_model"
SEED = 0
STRENGTH = 2.0
"""Strong enough for a few favourites per thing, so that both can find out what the other one does with them."""
BATCH = 64
UPDATES = 400


def main(folder: str | Path = SEED_MODEL, strength: str | float = STRENGTH) -> None:
    """Trains, saves tokenizer and model, prints the loss."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model, habits = build_model(tokenizer), apart(rng, float(strength))
    rows = [encode(tokenizer, habits.demonstration(rng)) for _ in range(UPDATES * BATCH)]
    settings = SupervisedSettings(
        batch=BATCH,
        optimizer=AdamWSettings(learning_rate=3e-3, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=20, decay_steps=UPDATES, min_ratio=0.05),
    )

    def progress(update: int, loss: float) -> None:
        if update % 50 == 0:
            print(f"{update}/{UPDATES}: loss {loss:.3f}", flush=True)

    print(f"{model.num_parameters():,} parameters; habits succeed in {habits.success:.3f} of the sightings")
    train_supervised(model, rows, settings, seed=SEED, progress=progress)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def apart(rng: random.Random, strength: float) -> Habits:
    """Habits with which a team does no better than one that guesses: others are drawn again."""
    while (habits := Habits(rng, strength)).success > 1 / len(THINGS) + 1e-12:
        pass
    return habits


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with two layers."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        # Small, because texts are short: more of a head's dimensions tell neighbours apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Demonstration:
    """Ids as the run's chat renderer makes them; trained are those that the assistant samples, its end included."""
    ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    trained[-len(messages[-1]["content"]) - 1 :] = True
    return Demonstration(ids=ids, trained=trained)


if __name__ == "__main__":
    main(*sys.argv[1:3])
