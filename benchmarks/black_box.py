"""The math team as a program behind the gateway against the team of flexmarl's own agents: success, and time of a step.

    make bench-program

A run is `flexmarl train` of `examples/black_box/cpu.yaml` or `examples/math_team/cpu.yaml`: same seed model, tasks,
rewards, batch and learning rate, with processes as both have them. Each seed trains both, one after the other.

    success_vs_white_box    least difference of success on held-out tasks after training, of all seeds
    time_vs_white_box       the program's seconds per step by the white-box team's: median over seeds
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import report

from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder

EXAMPLES = Path(__file__).parent.parent / "examples"
TEAMS = {"program": "black_box", "white box": "math_team"}
WARM_UP = 2


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    before: float
    """Success on held-out tasks."""
    after: float
    step_s: float
    """Seconds of a training step: median after `WARM_UP`."""


def train(example: str, seed: int, overrides: list[str]) -> Trained:
    """Trains, in processes of its own."""
    with tempfile.TemporaryDirectory() as out:
        config = EXAMPLES / example / "cpu.yaml"
        settings = [f"out={out}", f"seed={seed}", "checkpoint.every=0", *overrides]
        command = [sys.executable, "-m", "flexmarl", "train", str(config), *settings]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        folder = RunFolder(next(Path(out).iterdir()))
        held_out = json.loads(folder.summary.read_text())["eval"]
        steps = read_metrics(folder.metrics)
    seconds = [values["time/step_s"] for step, values in steps.items() if step > WARM_UP and "time/step_s" in values]
    return Trained(held_out["before"]["success"], held_out["after"]["success"], statistics.median(seconds))


def main() -> None:
    """Trains both teams with each seed, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="which (default 1 to 5)")
    options.add_argument("--override", action="append", default=[], help="a setting of both, such as steps=3")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    found: dict[int, dict[str, Trained]] = {}
    for seed in chosen.seeds:
        found[seed] = {}
        for team, example in TEAMS.items():
            found[seed][team] = train(example, seed, chosen.override)
            print(f"seed {seed}: {team} {found[seed][team]}", flush=True)
    differences = [teams["program"].after - teams["white box"].after for teams in found.values()]
    ratios = [teams["program"].step_s / teams["white box"].step_s for teams in found.values()]
    report(
        f"Both teams, {len(found)} seeds",
        ["seed", *(f"{team}: {what}" for team in TEAMS for what in ("before", "after", "s/step"))],
        [
            [
                str(seed),
                *(f"{x:.3f}" for team in TEAMS for x in (teams[team].before, teams[team].after, teams[team].step_s)),
            ]
            for seed, teams in found.items()
        ],
        {"success_vs_white_box": min(differences), "time_vs_white_box": statistics.median(ratios)},
        as_json=chosen.json,
        wanted={"success_vs_white_box": -0.03},
        wanted_at_most={"time_vs_white_box": 1.3},
    )


if __name__ == "__main__":
    main()
