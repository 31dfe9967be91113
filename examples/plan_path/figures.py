"""Prints what runs of plan_path came to, and draws their success on held-out maps over the tokens they sampled.

    python -m examples.plan_path.figures curves.png runs/plan_path-20260131-142530 runs/plan_path-20260131-143021

| column | meaning |
|---|---|
| before, after | success on 256 held-out maps at temperature 1 |
| tokens | sampled in training |
| saved | share of the tokens of a step's rows, prompts included, that rows of one policy have in common with others |
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flexmarl.analysis.curve import INK, PALETTE
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.store_file import read_store
from flexmarl.records import IntArray
from flexmarl.training.tree.merge import merge


def main(picture: Path, runs: Sequence[Path]) -> None:
    """A row of the table per run; a line of the picture per run, in one colour for all seeds of a config."""
    print("| run | seed | before | after | tokens | time, s | saved |\n|---|---|---|---|---|---|---|")
    figure = Figure(figsize=(5.2, 3.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="sampled tokens, thousands", ylabel="held-out success", ylim=(0, 1))
    colours: dict[str, str] = {}
    for run in sorted(runs):
        folder = RunFolder(run)
        settings = yaml.safe_load(folder.config.read_text())
        summary = json.loads(folder.summary.read_text())
        before, after = (summary["eval"][when]["success"] for when in ("before", "after"))
        name, seed, took = settings["name"], settings["seed"], summary["wall_s"]
        points = list(curve(folder))
        print(
            f"| {name} | {seed} | {before:.3f} | {after:.3f} | {points[-1][0]:,} | {took:.0f} | {saved(folder):.2f} |"
        )
        label = None if name in colours else name
        colour = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
        axes.plot([x / 1000 for x, _ in points], [y for _, y in points], color=colour, linewidth=1.1, label=label)
    axes.axhline(0.85, color=INK, linewidth=0.6, linestyle=":")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def curve(folder: RunFolder) -> Iterator[tuple[int, float]]:
    """(tokens sampled so far, success) of every evaluation."""
    steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    sampled = accumulate(int(values.get("rollout/tokens", 0)) for values in steps)
    for tokens, values in zip(sampled, steps, strict=True):
        if "eval/team/success" in values:
            yield tokens, values["eval/team/success"]


def saved(folder: RunFolder) -> float:
    """Share of the tokens of rows that a prefix tree of each step's rows computes once instead of several times."""
    batches: dict[tuple[str, int | None], list[tuple[IntArray, int]]] = defaultdict(list)
    with read_store(folder.store) as reader:
        for agent in reader.agents:
            for row in reader.rows(agent):
                prompt, response = row.values["prompt_ids"], row.values["response_ids"]
                batches[row.policy, row.version].append((np.concatenate([prompt, response])[:-1], len(response)))
    alone = sum(len(ids) for batch in batches.values() for ids, _ in batch)
    merged = sum(merge(*map(list, zip(*batch, strict=True))).num_tokens for batch in batches.values())
    return 1 - merged / alone


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
