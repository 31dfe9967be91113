"""Makes the seed model of the SQL team, by supervised cold start.

    python -m examples.sql_team.make_seed [folder]

About two minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import sys
from functools import partial
from pathlib import Path

from examples.cold_start import cold_start, small_qwen3
from examples.sql_team.demonstrations import demonstration

SEED_MODEL = Path(__file__).parent / "seed_model"
MODEL = partial(small_qwen3, hidden=128, inner=256, layers=3, positions=192, theta=200.0, spread=0.04)


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, MODEL, demonstration, updates=800, batch=32, rate=3e-3, warmup=50)


if __name__ == "__main__":
    main(*sys.argv[1:2])
