"""Starts the command line: `flexmarl`, or `python -m flexmarl`. Ctrl-C ends it without a traceback from here on."""

import os
import sys

from flexmarl.imports import collected_later

BRIEF_SPIN = "20000"
"""Turns for which torch's threads wait for each other before they sleep: under a millisecond, OpenMP's default is 15
times that. Between the operations of a pass they wait less. A thread that gets no core, because other programs compute,
costs them a whole wait at each operation (`benchmarks/shared_cores.py`)."""


def main() -> None:
    """Loads the commands, which takes half a second, and runs one."""
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = BRIEF_SPIN  # Read when torch is loaded.
    try:
        with collected_later():
            from flexmarl.cli import main as run_command
    except KeyboardInterrupt:
        print("flexmarl: stopped", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
