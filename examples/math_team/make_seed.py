"""Makes the seed model of the math team, by supervised cold start, and prints what it can do.

    python -m examples.math_team.make_seed [folder]

About five minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from pathlib import Path
from typing import NamedTuple

from examples.cold_start import SEED, encode, learn, save, small_qwen3
from examples.math_team.demonstrations import COMPARING, COPYING, HABITS, JUDGING, TABLE, Habits, demonstration
from examples.math_team.properties import properties
from examples.math_team.tokenizer import build_tokenizer

SEED_MODEL = Path(__file__).parent / "seed_model"
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
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    # Three layers: where one is in the text, the digit to copy or compare, the decision.
    model = small_qwen3(
        tokenizer, hidden=160, inner=384, layers=3, head_dim=40, positions=256, theta=200.0, spread=0.04
    )
    for name, stage in STAGES.items():
        rows = [encode(tokenizer, demonstration(rng, stage.habits)) for _ in range(stage.updates * BATCH)]
        learn(model, rows, batch=BATCH, rate=stage.learning_rate, warmup=50, name=name)
    save(folder, model, tokenizer)
    for what, share in properties(model.eval(), tokenizer, random.Random(SEED + 1)):
        print(f"{what:<50} {share:.3f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
