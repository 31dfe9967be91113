"""Streaming credit (`credit.streaming: linear`): what a step gains if rows are trained before their group is complete.

    python benchmarks/streaming.py --json

Three ways to wait for the credit of a row, with one and the same update:

    group       a row is trained when all episodes of its task have ended: group estimators need that
    streaming   the same estimator; rows are trained when their episode has ended, as two gradient sums
    row         an estimator of single rows (reinforce), trained when their episode has ended: no credit is faster

The simulated steps are those of examples/paper/ma and ca under our rules: 64 trajectories a step, in tasks of 16 or 8
episodes. The real run is that of pipeline.py: two policies of 0.8M parameters on this CPU, in processes of their own.

    *_step_vs_group       mean step time with streaming by that without, simulated, 16 episodes a task
    *_step_vs_group_8     the same, 8 episodes a task
    *_step_vs_row         mean step time with streaming by that of `row`
    real_step_vs_group    median over rounds of the ratio of median step times, real
"""

import os
import statistics
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from character_model import save_character_model
from common import parser, report
from paper_tables import Played, Run, play
from pipeline import CODE, VARIANTS, WARM_UP, settings_of
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.metrics import read_metrics

CREDITS: Mapping[str, Mapping[str, Any]] = {
    "group": {"estimator": {"type": "default"}, "filter": None},
    "streaming": {"estimator": {"type": "default"}, "filter": None, "streaming": "linear"},
    "row": {"estimator": {"type": "reinforce"}, "filter": None, "ready": "trajectory"},
}
SIZES = {16: 4, 8: 8}
"""Episodes of a task -> tasks of a step."""
SEED = 1
WANTED_AT_MOST = {"ma_step_vs_group": 0.92}


def runs_of(steps: int) -> dict[tuple[str, int, str], Run]:
    """Every simulated run: workload, episodes of a task, credit."""
    return {
        (workload, episodes, name): Run(
            config=f"{workload}/ours",
            steps=steps,
            seed=SEED,
            overrides=(
                f"batch.groups={groups}",
                f"batch.episodes={episodes}",
                f"rollout.inter_query={groups}",
                f"rollout.intra_query={episodes}",
                "credit.ready=group",
                *(f"credit.{key}={_yaml(value)}" for key, value in credit.items()),
            ),
        )
        for workload in ("ma", "ca")
        for episodes, groups in SIZES.items()
        for name, credit in CREDITS.items()
    }


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def simulated(steps: int) -> dict[tuple[str, int, str], Played]:
    """Plays the simulated runs, one on each core at a time."""
    runs = runs_of(steps)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        return dict(zip(runs, processes.map(play, runs.values()), strict=True))


def real_step_s(credit: str, folder: Path, steps: int) -> float:
    """Median seconds of a step of a real run."""
    sections = settings_of(VARIANTS["microbatch"], folder, steps) | {"credit": CREDITS[credit]}
    (folder / "run.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
    run = assemble_run(load_run(folder / "run.yaml"))
    run.train(Console(quiet=True))
    values = read_metrics(run.folder / "metrics.jsonl")
    return statistics.median(values[step]["time/step_s"] for step in sorted(values) if step > WARM_UP)


def real(rounds: int, steps: int) -> dict[str, list[float]]:
    """Runs the real variants in turn; returns the median step of each round."""
    found: dict[str, list[float]] = {name: [] for name in CREDITS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_character_model(folder / "model")
        (folder / "team.py").write_text(CODE, encoding="utf-8")
        for _ in range(rounds):
            for credit, medians in found.items():
                medians.append(real_step_s(credit, folder, steps))
    return found


def main() -> None:
    """Plays and runs everything, prints the table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=64, help="simulated steps (default 64)")
    options.add_argument("--real-steps", type=int, default=6, help="measured steps of each real run (default 6)")
    chosen = options.parse_args()
    played, measured = simulated(chosen.steps), real(chosen.repeats, chosen.real_steps)
    mean = {key: one.mean_s for key, one in played.items()}
    ratios = [ours / other for ours, other in zip(measured["streaming"], measured["group"], strict=True)]
    figures = {
        "ma_step_vs_group": mean["ma", 16, "streaming"] / mean["ma", 16, "group"],
        "ma_step_vs_group_8": mean["ma", 8, "streaming"] / mean["ma", 8, "group"],
        "ma_step_vs_row": mean["ma", 16, "streaming"] / mean["ma", 16, "row"],
        "ca_step_vs_group": mean["ca", 16, "streaming"] / mean["ca", 16, "group"],
        "ca_step_vs_group_8": mean["ca", 8, "streaming"] / mean["ca", 8, "group"],
        "ca_step_vs_row": mean["ca", 16, "streaming"] / mean["ca", 16, "row"],
        "real_step_vs_group": statistics.median(ratios),
    }
    rows = [
        [workload.upper(), str(episodes), *(f"{mean[workload, episodes, credit]:.1f}" for credit in CREDITS)]
        for workload in ("ma", "ca")
        for episodes in SIZES
    ]
    rows.append(["real", "", *(f"{statistics.median(measured[credit]):.2f}" for credit in CREDITS)])
    report(
        f"Mean seconds of a step, {chosen.steps} simulated steps; median of {chosen.repeats} real rounds",
        ["workload", "episodes", *CREDITS],
        rows,
        figures,
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
