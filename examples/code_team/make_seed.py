"""Makes the seed model of the code team, by supervised cold start.

    python -m examples.code_team.make_seed [folder]

About four minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from pathlib import Path

import torch

from examples.code_team.demonstrations import demonstration
from examples.math_team.make_seed import BATCH, SEED, build_model, encode, train
from examples.math_team.tokenizer import build_tokenizer

SEED_MODEL = Path(__file__).parent / "seed_model"
UPDATES = 2000


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains, saves tokenizer and model, prints the loss."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model = build_model(tokenizer, hidden=128, inner=256, positions=96)
    print(f"{model.num_parameters():,} parameters")
    train("form", model, [encode(tokenizer, demonstration(rng)) for _ in range(UPDATES * BATCH)], 3e-3)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
