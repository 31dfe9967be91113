"""Makes the seed model of the long notes, by supervised cold start.

    python -m examples.long_notes.make_seed [folder]

Two minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import sys
from functools import partial
from pathlib import Path

from examples.cold_start import cold_start, small_qwen3
from examples.long_notes.demonstrations import demonstration

SEED_MODEL = Path(__file__).parent / "seed_model"
MODEL = partial(small_qwen3, key_heads=4, positions=64)


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, MODEL, demonstration, updates=1500, batch=64, rate=5e-3, warmup=30, ends=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
