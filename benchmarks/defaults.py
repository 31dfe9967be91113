"""Defaults of credit and training against alternatives, on the examples, five seeds each: held-out success at the end.

    python benchmarks/defaults.py --json                              # hours: three examples on two cores
    python benchmarks/defaults.py --json --examples relay --changes shipped kl
    python benchmarks/defaults.py --json --no-runs                    # the table of what was run so far

A change is one alternative to what the example ships, all else equal; `shipped` is no change. A run is a process of
its own, inline, with one thread; `--repeats` is the number of seeds, from 1. What a run came to is kept in `--folder`,
and a run that is there is not run again: the script goes on where it was stopped.

    shipped - x     mean over seeds of the difference between both runs of a seed, with its standard error
    control         math_team with rewards that another attempt earned: nothing can be learned, so success should stay
                    where it was; 1024 held-out tasks, whose standard error is 0.015
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from common import parser, report
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "math_team": ("solver", "verifier"),
    "relay": ("speaker", "listener"),
    "plan_path": ("planner", "executor"),
    "real_team": ("solver", "checker"),
    "control": ("solver", "verifier"),
}
"""The trained policies of each. `control` is math_team with shuffled rewards."""
CONTROL = ("team.workflow.name=math_team_shuffled_rewards", "evaluate.tasks=1024")
CHANGES = {
    "shipped": ("", ""),
    "kl": ("kl={coef: 0.05}", ""),
    "std": ("", "credit.estimator.scale=std"),
    "filter": ("", "credit.filter={other}"),
    "entropy": ("entropy_coef={other}", ""),
    "eps": ("optimizer.eps=1e-4", ""),
    "beta2": ("optimizer.beta2=0.999", ""),
    "no_clip": ("max_grad_norm=null", ""),
    "no_penalty": ("", "credit.invalid_action=null"),
}
"""A setting of each trained policy's `training`, or one of the run. `{other}` is what the example does not ship."""
OTHERS = {
    "filter": {"relay": "{}", None: "null"},
    "entropy": {"relay": "0.01", "real_team": "0.0", None: "0.01"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run."""

    example: str
    change: str
    seed: int

    @property
    def overrides(self) -> list[str]:
        """The run's settings, beside those of the example."""
        of_policy, of_run = CHANGES[self.change]
        by_example = OTHERS.get(self.change, {})
        other = by_example.get(self.example, by_example.get(None, ""))
        changed = [f"policies.{policy}.training.{of_policy}" for policy in EXAMPLES[self.example] if of_policy]
        changed += [of_run] if of_run else []
        return [
            *("cluster.backend=inline", "cluster.threads=1", "checkpoint.every=0", f"seed={self.seed}"),
            *("evaluate.every=0", *(CONTROL if self.example == "control" else ())),
            *(text.replace("{other}", other) for text in changed),
        ]

    def file(self, folder: Path) -> Path:
        """The file that keeps what the run came to."""
        return folder / self.example / f"{self.change}-{self.seed}.json"

    def run(self, folder: Path) -> None:
        """Trains, and keeps the success before and after. Raises RuntimeError with the run's last words if it fails."""
        team = "math_team" if self.example == "control" else self.example
        with TemporaryDirectory() as out:
            words = ["train", str(ROOT / "examples" / team / "cpu.yaml"), f"out={out}", "--quiet", *self.overrides]
            done = subprocess.run(
                [sys.executable, "-m", "flexmarl", *words],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"{self}: {done.stderr[-2000:]}")
            (summary,) = Path(out).glob("*/summary.json")
            played = json.loads(summary.read_text())["eval"]
        file = self.file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({when: played[when]["success"] for when in ("before", "after")}))


def run_all(trials: Sequence[Trial], folder: Path, jobs: int) -> None:
    """Runs what was not run yet, `jobs` at a time, in the order given."""
    left = [trial for trial in trials if not trial.file(folder).is_file()]
    with ThreadPoolExecutor(jobs) as pool:
        for number, (trial, _) in enumerate(zip(left, pool.map(lambda trial: trial.run(folder), left), strict=True), 1):
            found = json.loads(trial.file(folder).read_text())
            Console(stderr=True).print(
                f"{number}/{len(left)} {trial.example} {trial.change} seed {trial.seed}: "
                f"{found['before']:.3f} to {found['after']:.3f}",
                highlight=False,
            )


def successes(example: str, change: str, seeds: Sequence[int], folder: Path) -> dict[int, tuple[float, float]]:
    """Success before and after, by seed, of the runs that ended."""
    files = {seed: Trial(example=example, change=change, seed=seed).file(folder) for seed in seeds}
    found = {seed: json.loads(file.read_text()) for seed, file in files.items() if file.is_file()}
    return {seed: (one["before"], one["after"]) for seed, one in found.items()}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; the error of one value is not a number."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def rows(
    examples: Sequence[str], changes: Sequence[str], seeds: Sequence[int], folder: Path, figures: dict[str, float]
) -> Iterator[list[str]]:
    """A row for each example and change that has runs; adds its figures."""
    for example in examples:
        shipped = successes(example, "shipped", seeds, folder)
        for change in changes:
            found = successes(example, change, seeds, folder)
            if not found:
                continue
            after, _ = mean_and_error([after for _, after in found.values()])
            moved, moved_error = mean_and_error([after - before for before, after in found.values()])
            figures[f"{example}_{change}"] = after
            if example == "control":
                figures[f"control_{change}_change"] = moved
            paired = [shipped[seed][1] - found[seed][1] for seed in found if seed in shipped and change != "shipped"]
            less = "" if not paired else "{:+.3f} +- {:.3f}".format(*mean_and_error(paired))
            each = " ".join(f"{after:.3f}" for _, (_, after) in sorted(found.items()))
            yield [example, change, f"{after:.3f}", f"{moved:+.3f} +- {moved_error:.3f}", less, each]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--examples", nargs="+", default=[*EXAMPLES], choices=[*EXAMPLES])
    options.add_argument("--changes", nargs="+", default=[*CHANGES], choices=[*CHANGES])
    options.add_argument("--folder", type=Path, default=ROOT / "runs" / "defaults", help="where results are kept")
    options.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    options.add_argument("--no-runs", action="store_true", help="run nothing; the table of what is in the folder")
    given = options.parse_args()
    seeds = range(1, given.repeats + 1)
    if not given.no_runs:
        run_all(
            [
                Trial(example=one, change=change, seed=seed)
                for change in given.changes
                for one in given.examples
                for seed in seeds
            ],
            given.folder,
            given.jobs,
        )
    figures: dict[str, float] = {}
    table = list(rows(given.examples, given.changes, seeds, given.folder, figures))
    report(
        "Held-out success after training",
        ("example", "change", "after", "moved", "shipped - x", "by seed"),
        table,
        figures,
        as_json=given.json,
    )


if __name__ == "__main__":
    main()
