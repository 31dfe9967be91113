"""Prints what runs of an example came to, and draws their success over the steps.

    python -m examples.relay.figures curves.png runs/relay-20260131-142530 runs/relay-20260131-143021
    python -m examples.relay.figures curves.png runs/nim-* --figure winning_moves

Runs of one name, `relay-1` and `relay-2` say, have one colour.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexmarl.analysis.curve import INK, PALETTE, smooth
from flexmarl.events.run_folder import RunFolder


def main(picture: Path, runs: Sequence[Path], figure_of: str = "success") -> None:
    """A row of the table and a line of the picture per run. `figure_of`: the team's figure that is shown."""
    print("| run | seed | before | after | steps to 0.9 | time, s |\n|---|---|---|---|---|---|")
    figure = Figure(figsize=(5.2, 3.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel=figure_of.replace("_", " "), ylim=(0, 1.02))
    colours: dict[str, str] = {}
    for folder in map(RunFolder, sorted(runs)):
        settings = yaml.safe_load(folder.config.read_text())
        summary = json.loads(folder.summary.read_text())
        name, points = settings["name"].rsplit("-", 1)[0], curve(folder, figure_of)
        evaluated = (summary["eval"].get(when) for when in ("before", "after"))
        before, after = (f"{one[figure_of]:.3f}" if one else "-" for one in evaluated)
        reached = next((str(step) for step, success in points if success >= 0.9), "never")
        print(f"| {name} | {settings['seed']} | {before} | {after} | {reached} | {summary['wall_s']:.0f} |")
        label = None if name in colours else name
        colour = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
        steps, successes = zip(*points, strict=True)
        axes.plot(steps, smooth(successes), color=colour, linewidth=1.1, label=label)
    axes.axhline(0.95, color=INK, linewidth=0.6, linestyle=":")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def curve(folder: RunFolder, figure_of: str) -> list[tuple[int, float]]:
    """(step, the team's figure of the episodes it was trained on)."""
    steps, name = [json.loads(line) for line in folder.metrics.read_text().splitlines()], f"team/{figure_of}"
    return [(values["step"], values[name]) for values in steps if name in values]


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("picture", type=Path)
    given.add_argument("runs", type=Path, nargs="+")
    given.add_argument("--figure", default="success", help="the team's figure that is shown")
    asked = given.parse_args()
    main(asked.picture, asked.runs, asked.figure)
