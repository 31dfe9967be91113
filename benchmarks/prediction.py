"""A prediction, and what came of it: costs fitted to one real run say how long a changed one will take.

    python benchmarks/prediction.py --json

The team of examples/math_team trains for a few steps in the ray world, one process for each engine and trainer on two
cores. Its journal is fitted; then one setting at a time is changed, simulated with the fitted costs and the recorded
replies, and run for real. The first step of every run is left out: models and caches are warm only after it. Real runs
are played in turns, so that a noisy neighbour disturbs all of them alike.

    predicted_vs_measured        predicted by measured mean step time, one setting changed; the one farthest from 1
    predicted_vs_measured_both   the same, both settings changed at once
"""

import tempfile
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from statistics import fmean, median

from common import parser, report
from rich.console import Console

from flexmarl.analysis.facts import read_facts
from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.simulation import simulate
from flexmarl.cli.simulations import as_overrides, fitted
from flexmarl.config import RunSettings, load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder

CONFIG = Path(__file__).parents[1] / "examples" / "math_team" / "cpu.yaml"
COMMON = ("evaluate.tasks=0", "checkpoint.every=0", "cluster.backend=ray")
MICRO_BATCH = tuple(f"policies.{policy}.training.micro_batch=32" for policy in ("solver", "verifier"))
FITTED, BOTH = "as fitted", "both"
CHANGES: Mapping[str, Sequence[str]] = {
    FITTED: (),
    "rollout.inter_query 16 to 4": ("rollout.inter_query=4",),
    "micro_batch 128 to 32": MICRO_BATCH,
    BOTH: ("rollout.inter_query=4", *MICRO_BATCH),
}
WANTED = {"predicted_vs_measured": 0.85}
WANTED_AT_MOST = {"predicted_vs_measured": 1.15}


def measured_run(settings: RunSettings) -> RunFolder:
    """Trains for real."""
    run = assemble_run(settings)
    run.train(Console(quiet=True))
    return RunFolder(run.folder)


def warm_steps(folder: RunFolder) -> list[float]:
    """Seconds of every step but the first."""
    return [step.ended - step.began for step in read_facts(read_run(folder.journal)).steps[1:]]


def main() -> None:
    """Fits, predicts, measures, prints the table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=6, help="steps of each run, the first of which is left out")
    options.set_defaults(repeats=2)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        common = [*COMMON, f"steps={chosen.steps}", f"out={name}"]
        folders: dict[str, list[RunFolder]] = {change: [] for change in CHANGES}
        for _ in range(chosen.repeats):
            for change, overrides in CHANGES.items():
                folders[change].append(measured_run(load_run(CONFIG, [*common, *overrides])))
        base = folders[FITTED]
        fits = [(fitted(config := load_run(folder.config), folder, given=config), folder) for folder in base]
        rows, ratios = [], {}
        for change, overrides in CHANGES.items():
            predictions = [
                fmean(warm_steps(RunFolder(simulate(load_run(CONFIG, [*common, *overrides, *as_overrides(*fit)])))))
                for fit in fits
            ]
            steps = [step for folder in folders[change] for step in warm_steps(folder)]
            predicted, real = fmean(predictions), fmean(steps)
            ratios[change] = predicted / real
            cells = (predicted, real, median(steps), min(steps), max(steps))
            rows.append([change, *(f"{cell:.2f}" for cell in cells), f"{predicted / real - 1:+.0%}"])
    report(
        f"Step time of the math team, {chosen.repeats} runs of {chosen.steps} steps each",
        ["", "predicted, s", "measured, s (mean)", "median", "fastest", "slowest", "error"],
        rows,
        {
            "predicted_vs_measured": max(
                (ratio for change, ratio in ratios.items() if change not in (FITTED, BOTH)),
                key=lambda ratio: abs(log(ratio)),
            ),
            "predicted_vs_measured_both": ratios[BOTH],
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
