"""Prints what runs of the real team came to, and draws their success over the steps.

python -m examples.real_team.figures curves.png runs/real_team-20260131-142530 runs/real_team_full-20260131-143021
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexmarl.analysis.comparison import read_figures
from flexmarl.analysis.curve import PALETTE, smooth
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder

SHOWN = ("checker/accuracy", "tool_used/hard", "tool_used/easy")
"""Figures of the evaluations beside the success."""


def main(picture: Path, runs: Sequence[Path]) -> None:
    """A row of the table and a line of the picture per run. Shares are those before and after training."""
    print(f"| run | seed | success | change, 95% interval | {' | '.join(SHOWN)} | minutes |")
    print(f"|{'---|' * (5 + len(SHOWN))}")
    figure = Figure(figsize=(5.2, 3.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="success", ylim=(0, 1.02))
    colours: dict[str, str] = {}
    for folder in map(RunFolder, sorted(runs)):
        name = yaml.safe_load(folder.config.read_text())["name"]
        print(f"| {' | '.join(cells(folder, name))} |")
        steps = [
            (step, of["team/success"]) for step, of in read_metrics(folder.metrics).items() if "team/success" in of
        ]
        label = None if name in colours else name
        colour = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
        numbers, successes = zip(*steps, strict=True)
        axes.plot(numbers, smooth(successes), color=colour, linewidth=1.1, label=label)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def cells(folder: RunFolder, name: str) -> Iterator[str]:
    """One row of the table."""
    summary = json.loads(folder.summary.read_text())
    evaluated = [summary["eval"][when] for when in ("before", "after")]
    changed = read_figures(folder).figures["success, after - before"].interval()
    yield name
    yield str(yaml.safe_load(folder.config.read_text())["seed"])
    yield " → ".join(f"{of['success']:.3f}" for of in evaluated)
    yield f"{changed.value:+.3f} ({changed.low:.3f} to {changed.high:.3f})"
    for shown in SHOWN:
        yield " → ".join(f"{of[shown]:.3f}" for of in evaluated)
    yield f"{summary['wall_s'] / 60:.1f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
