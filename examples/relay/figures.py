"""Prints what runs came to, of the relay or of the long notes, and draws their success over the steps.

    python -m examples.relay.figures curves.png runs/relay-20260131-142530 runs/relay-20260131-143021

Runs of one name, `relay-1` and `relay-2` say, have one colour.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexmarl.analysis.curve import INK, PALETTE, smooth
from flexmarl.events.run_folder import RunFolder


def main(picture: Path, runs: Sequence[Path]) -> None:
    """A row of the table and a line of the picture per run."""
    print("| run | seed | before | after | steps to 0.9 | time, s |\n|---|---|---|---|---|---|")
    figure = Figure(figsize=(5.2, 3.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="success", ylim=(0, 1.02))
    colours: dict[str, str] = {}
    for folder in map(RunFolder, sorted(runs)):
        settings = yaml.safe_load(folder.config.read_text())
        summary = json.loads(folder.summary.read_text())
        name, points = settings["name"].rsplit("-", 1)[0], curve(folder)
        before, after = (summary["eval"][when]["success"] for when in ("before", "after"))
        reached = next((str(step) for step, success in points if success >= 0.9), "never")
        print(f"| {name} | {settings['seed']} | {before:.3f} | {after:.3f} | {reached} | {summary['wall_s']:.0f} |")
        label = None if name in colours else name
        colour = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
        steps, successes = zip(*points, strict=True)
        axes.plot(steps, smooth(successes), color=colour, linewidth=1.1, label=label)
    axes.axhline(0.95, color=INK, linewidth=0.6, linestyle=":")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def curve(folder: RunFolder) -> list[tuple[int, float]]:
    """(step, success of the episodes it was trained on)."""
    steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [(values["step"], values["team/success"]) for values in steps if "team/success" in values]


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
