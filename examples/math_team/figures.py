"""Draws what the team learned, for the README: success, calls of the calculator, verdicts.

python examples/math_team/figures.py docs/images/math_team.png runs/RUN
"""

import sys
from pathlib import Path

from flexmarl.analysis.curve import draw_curve
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder

SHOWN = ("team/success", "team/tool_used/", "team/verifier/")


def main(picture: Path, run: Path) -> None:
    """Draws some panels of the run's `curve.png`."""
    steps = read_metrics(RunFolder(run).metrics)
    chosen = {
        step: {name: value for name, value in values.items() if name.removeprefix("eval/").startswith(SHOWN)}
        for step, values in steps.items()
    }
    draw_curve(chosen, picture, "A solver and a verifier learn together (make quickstart)")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
