"""Makes the seed model of the SQL team, by supervised cold start.

    python -m examples.sql_team.make_seed [folder]

About two minutes on one core. The same kind of machine gives the same model, bit for bit.
"""

import sys
from pathlib import Path

from examples.math_team.make_seed import cold_start
from examples.sql_team.demonstrations import demonstration

SEED_MODEL = Path(__file__).parent / "seed_model"


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, demonstration, updates=800, positions=160)


if __name__ == "__main__":
    main(*sys.argv[1:2])
