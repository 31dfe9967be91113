"""Makes the seed model of the relay, by supervised cold start, and prints what agents with its habits achieve.

    python -m examples.relay.make_seed [folder] [strength of the habits]

Half a minute on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from functools import partial
from pathlib import Path

from examples.cold_start import SEED, cold_start, small_qwen3
from examples.relay.demonstrations import Habits
from examples.relay.tasks import THINGS

SEED_MODEL = Path(__file__).parent / "seed_model"
STRENGTH = 2.0
"""Strong enough for a few favourites per thing, so that both can find out what the other one does with them."""
MODEL = partial(small_qwen3, head_dim=16, positions=64)


def main(folder: str | Path = SEED_MODEL, strength: str | float = STRENGTH) -> None:
    """Trains and saves; prints what agents with its habits achieve."""
    rng = random.Random(SEED)
    habits = apart(rng, float(strength))
    print(f"habits succeed in {habits.success:.3f} of the sightings")
    cold_start(folder, MODEL, habits.demonstration, rng=rng, updates=400, batch=64, rate=3e-3, warmup=20)


def apart(rng: random.Random, strength: float) -> Habits:
    """Habits with which a team does no better than one that guesses: others are drawn again."""
    while (habits := Habits(rng, strength)).success > 1 / len(THINGS) + 1e-12:
        pass
    return habits


if __name__ == "__main__":
    main(*sys.argv[1:3])
