"""Whether the defaults of credit and training are good: each against an alternative, on the examples, with five seeds.

    python benchmarks/defaults.py --json

A run is `flexmarl train` of an example's `cpu.yaml` in one process (`cluster.backend=inline`) with one setting changed:
the default in place of what the example chose, or an alternative in place of the default. `control` is the math team
that is paid what another attempt or verdict earned, on 1 024 held-out tasks: it should stay where it began.
`relay_entropy` is the relay as it once was, with a bonus for entropy and with groups whose rewards are equal.
`real_team` needs `make model`. `real_team_float32` is that team in float32, for a CPU without instructions for
bfloat16: there `make model` trains in float32, too.

All runs take hours. Each is kept as a line of `--kept` when it ends, so that runs can be added a few at a time, and
those that are there are not run again; `--no-runs` prints the table of what is there.

    after        mean success on held-out tasks after the last step
    least        the same of the worst seed
    while        mean success of the episodes of all training steps: who learns sooner has more
    control_*    change of the control's success from before to after training: its mean, as it is and with KL
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import report
from kept_runs import kept_in, play_all

from flexmarl.events.run_folder import RunFolder

EXAMPLES = Path(__file__).parent.parent / "examples"
KEPT = Path(__file__).parent / "defaults_runs.jsonl"
SEEDS = (1, 2, 3, 4, 5)
POLICIES = {
    "relay": ("speaker", "listener"),
    "relay_entropy": ("speaker", "listener"),
    "math_team": ("solver", "verifier"),
    "plan_path": ("planner", "executor"),
    "real_team": ("solver", "checker"),
    "real_team_float32": ("solver", "checker"),
    "control": ("solver", "verifier"),
}
VARIANTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "control": ("math_team", ["team.workflow.name=math_team_shuffled_rewards", "evaluate.tasks=1024"]),
    "relay_entropy": (
        "relay",
        [
            "policies.speaker.training.entropy_coef=0.03",
            "policies.listener.training.entropy_coef=0.03",
            "credit.filter=null",
        ],
    ),
    "real_team_float32": (
        "real_team",
        [f"policies.{name}.{part}.dtype=float32" for name in ("solver", "checker") for part in ("engine", "training")],
    ),
}
"""Of an example with another config: whose it is, and what differs."""
SHIPPED = "shipped"
TRAINING: Mapping[str, str] = {
    "kl 0.05": "kl={coef: 0.05}",
    "entropy 0.01": "entropy_coef=0.01",
    "entropy 0": "entropy_coef=0",
    "eps 1e-4": "optimizer.eps=1e-4",
    "beta2 0.999": "optimizer.beta2=0.999",
    "norm unbounded": "max_grad_norm=null",
    "mean over rows": "loss={type: ppo, aggregation: seq-mean-token-mean}",
}
"""Changes of each policy's `training`."""
CREDIT: Mapping[str, Sequence[str]] = {
    "std": ("estimator.type=default", "estimator.scale=std"),
    "filter": ("filter={}",),
    "no filter": ("filter=null",),
    "no penalty": ("invalid_action=null",),
}
"""Changes of `credit`."""
CHANGES = (SHIPPED, *TRAINING, *CREDIT)
AS_SHIPPED = {
    "relay": {"filter", "entropy 0"},
    "relay_entropy": {"no filter"},
    "math_team": {"filter", "entropy 0"},
    "plan_path": {"filter", "entropy 0"},
    "real_team": {"filter", "entropy 0.01"},
    "real_team_float32": {"filter", "entropy 0.01"},
    "control": {"filter", "entropy 0"},
}
"""Changes that change nothing, because the example has it so."""


@dataclass(frozen=True, order=True)
class Cell:
    """A run: an example with a change."""

    seed: int
    change: str
    example: str

    @property
    def overrides(self) -> Iterator[str]:
        """What the command line adds to the config."""
        yield from (f"seed={self.seed}", "cluster.backend=inline", "checkpoint.every=0", "evaluate.every=0")
        # Nothing fails because the machine stood still for a while.
        yield from ("rollout.call_timeout_s=7200", "rollout.episode_timeout_s=7200")
        yield from VARIANTS.get(self.example, ("", ()))[1]
        if self.config.parent.name == "real_team":
            yield "cluster.threads=1"  # Jobs with two threads each wait for one another's.
        if self.change in TRAINING:
            yield from (f"policies.{name}.training.{TRAINING[self.change]}" for name in POLICIES[self.example])
        elif self.change in CREDIT:
            yield from (f"credit.{change}" for change in CREDIT[self.change])

    @property
    def config(self) -> Path:
        """Of the example."""
        return EXAMPLES / VARIANTS.get(self.example, (self.example, ()))[0] / "cpu.yaml"


@dataclass(frozen=True)
class Played:
    """What came of it."""

    example: str
    change: str
    seed: int
    before: float
    """Success on held-out tasks."""
    after: float
    mean: float
    """Success in training, over all steps."""

    @property
    def cell(self) -> Cell:
        """What was run."""
        return Cell(self.seed, self.change, self.example)


def play(cell: Cell) -> Played:
    """Trains, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "flexmarl", "train", str(cell.config), f"out={out}", *cell.overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        folder = RunFolder(next(Path(out).iterdir()))
        held_out = json.loads(folder.summary.read_text())["eval"]
        steps = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return Played(
        example=cell.example,
        change=cell.change,
        seed=cell.seed,
        before=held_out["before"]["success"],
        after=held_out["after"]["success"],
        mean=statistics.fmean(step["team/success"] for step in steps if "team/success" in step),
    )


def rows_of(found: Sequence[Played]) -> Iterator[list[str]]:
    """A row for each example and change."""
    for example in POLICIES:
        for change in CHANGES:
            if runs := [one for one in found if (one.example, one.change) == (example, change)]:
                after = [one.after for one in runs]
                yield [
                    example,
                    change,
                    str(len(runs)),
                    f"{statistics.fmean(one.before for one in runs):.3f}",
                    f"{statistics.fmean(after):.3f}",
                    f"{min(after):.3f}",
                    f"{statistics.fmean(one.mean for one in runs):.3f}",
                    " ".join(f"{one.after:.3f}" for one in sorted(runs, key=lambda one: one.seed)),
                ]


def control(found: Sequence[Played], change: str) -> float:
    """Mean change of the control's success; NaN without runs."""
    runs = [one for one in found if one.example == "control" and one.change == change]
    return statistics.fmean(one.after - one.before for one in runs) if runs else math.nan


def main() -> None:
    """Runs what is missing, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--examples", nargs="+", choices=POLICIES, default=[*POLICIES], help="which (default all)")
    options.add_argument("--changes", nargs="+", choices=CHANGES, default=[*CHANGES], help="which (default all)")
    options.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS], help="which (default 1 to 5)")
    options.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default one a core)")
    options.add_argument("--kept", type=Path, default=KEPT, help="file of the runs that ended (default beside this)")
    options.add_argument("--no-runs", action="store_true", help="print what is kept, run nothing")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    wanted = [
        Cell(seed, change, example)
        for example in chosen.examples
        for change in chosen.changes
        for seed in chosen.seeds
        if change not in AS_SHIPPED[example]
    ]
    if not chosen.no_runs:
        ended = {one.cell for one in kept_in(chosen.kept, Played)}
        play_all([cell for cell in wanted if cell not in ended], play, chosen.kept, jobs=chosen.jobs)
    found = kept_in(chosen.kept, Played)
    report(
        "Success on held-out tasks, by what was changed",
        ["example", "change", "seeds", "before", "after", "least", "while", "after, by seed"],
        [*rows_of(found)],
        {"control_shipped": control(found, SHIPPED), "control_kl": control(found, "kl 0.05")},
        as_json=chosen.json,
    )


if __name__ == "__main__":
    main()
