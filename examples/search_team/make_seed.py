"""Makes the seed model of the search team, by supervised cold start.

    python -m examples.search_team.make_seed [folder]

About three minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import sys
from functools import partial
from pathlib import Path

from examples.cold_start import cold_start, small_qwen3
from examples.search_team.demonstrations import demonstration

SEED_MODEL = Path(__file__).parent / "seed_model"
MODEL = partial(small_qwen3, layers=3, key_heads=4, positions=128)


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, MODEL, demonstration, updates=2000, batch=64, epochs=2, rate=5e-3, warmup=30)


if __name__ == "__main__":
    main(*sys.argv[1:2])
