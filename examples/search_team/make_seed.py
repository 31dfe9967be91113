"""Makes the seed model of the search team, by supervised cold start, and prints the loss.

    python -m examples.search_team.make_seed [folder]

About three minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.make_seed import encode
from examples.math_team.tokenizer import END, PAD, build_tokenizer
from examples.search_team.demonstrations import demonstration
from flexmarl.training.backends.supervised import train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

SEED_MODEL = Path(__file__).parent / "seed_model"
SEED, BATCH, UPDATES, EPOCHS = 0, 64, 2000, 2


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains, saves tokenizer and model."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model = build_model(tokenizer)
    rows = [encode(tokenizer, demonstration(rng)) for _ in range(UPDATES * BATCH // EPOCHS)]
    settings = SupervisedSettings(
        batch=BATCH,
        epochs=EPOCHS,
        optimizer=AdamWSettings(learning_rate=5e-3, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=30, decay_steps=UPDATES, min_ratio=0.05),
    )

    def progress(update: int, loss: float) -> None:
        if update % 50 == 0:
            print(f"{update}/{UPDATES}: loss {loss:.3f}", flush=True)

    print(f"{model.num_parameters():,} parameters", flush=True)
    train_supervised(model, rows, settings, seed=SEED, progress=progress)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with three layers. Its heads are wide, because they have to carry characters."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        # Small, because texts are short: more of a head's dimensions tell neighbours apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main(*sys.argv[1:2])
