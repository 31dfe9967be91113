"""Makes the seed model of the code team, by supervised cold start.

    python -m examples.code_team.make_seed [folder]

About four minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import sys
from pathlib import Path

from examples.code_team.demonstrations import demonstration
from examples.math_team.make_seed import cold_start

SEED_MODEL = Path(__file__).parent / "seed_model"


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, demonstration, updates=2000, positions=96)


if __name__ == "__main__":
    main(*sys.argv[1:2])
