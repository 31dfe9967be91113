"""What a team learns and costs, by how far it is specialised: levels L0 to L3 and a mixed one, with three seeds.

    python benchmarks/levels.py --json

A run is `flexmarl train` (of L0 `flexmarl eval`) of an example's `cpu.yaml` in one process (`cluster.backend=inline`,
one thread), with the policies of the level; everything else is the example's:

    L0        no policy is trained
    L1        one policy for both agents
    L2        an adapter of rank 16 for each agent, ten times the example's learning rate
    together  the same, trained in passes that the two share
    L3        a policy for each agent, all weights, as the example has it
    mixed     the first agent's policy with all weights, the second agent's with an adapter

Each run is kept as a line of `--kept` when it ends, and those that are there are not run again.

    before, after   mean success on 256 held-out tasks, before and after the last step; of `least` the worst seed
    cpu_s           seconds of the processor, start and the two evaluations included
    peak_mib        the largest resident memory of the process, libraries included (about 500 MiB)
    state_mib       the last checkpoint's trained state: weights, masters and moments
    *_l2_vs_l3      one of these of L2 by that of L3: mean over the examples
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import report
from kept_runs import kept_in, play_all

from flexmarl.events.run_folder import RunFolder

EXAMPLES = Path(__file__).parent.parent / "examples"
KEPT = Path(__file__).parent / "levels_runs.jsonl"
AGENTS = {"math_team": ("solver", "verifier"), "plan_path": ("planner", "executor")}
LEVELS = ("L0", "L1", "L2", "together", "L3", "mixed")
SEEDS = (1, 2, 3)
LORA = {"rank": 16, "alpha": 32}
MIB = 2**20


@dataclass(frozen=True, order=True)
class Cell:
    """A run."""

    seed: int
    level: str
    example: str

    @property
    def config(self) -> Mapping[str, Any]:
        """The example's, with the level's policies."""
        folder = EXAMPLES / self.example
        config = yaml.safe_load((folder / "cpu.yaml").read_text())
        config["base"] = str(folder)
        if "extends" in config:
            config["extends"] = str(folder / config["extends"])
        first, second = AGENTS[self.example]
        for name in (first, second):
            policy = config["policies"][name] = deepcopy(config["policies"][name])  # YAML's anchor made them one.
            if self.level in ("L2", "together") or (self.level, name) == ("mixed", second):
                policy["training"] |= {"lora": LORA, "together": self.level == "together"}
                optimizer = policy["training"]["optimizer"]
                optimizer["learning_rate"] = 10 * float(optimizer["learning_rate"])
        if self.level == "L1":
            config["policies"].pop(second)
            config.setdefault("team", {}).setdefault("agents", {}).setdefault(second, {})["policy"] = first
        return config


@dataclass(frozen=True)
class Played:
    """What came of it."""

    example: str
    level: str
    seed: int
    before: float
    """Success on held-out tasks."""
    after: float
    cpu_s: float
    peak_mib: float
    state_mib: float

    @property
    def cell(self) -> Cell:
        """What was run."""
        return Cell(self.seed, self.level, self.example)


def play(cell: Cell) -> Played:
    """Trains and evaluates, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "config.yaml", Path(folder) / "out"
        file.write_text(yaml.safe_dump(dict(cell.config)))
        what = "eval" if cell.level == "L0" else "train"
        command = [sys.executable, "-m", "flexmarl", what, str(file), f"out={out}", f"seed={cell.seed}"]
        command += ["cluster.backend=inline", "evaluate.every=0", *(["--json"] if what == "eval" else [])]
        with (Path(folder) / "printed").open("w+") as printed:
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            printed.seek(0)
            text = printed.read()
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}:\n{text}")
        if what == "eval":
            before = after = json.loads(text.splitlines()[-1])["metrics"]["success"]
        else:
            held_out = json.loads(RunFolder(next(out.iterdir())).summary.read_text())["eval"]
            before, after = held_out["before"]["success"], held_out["after"]["success"]
        newest = max(out.glob("*/checkpoints/step-*"), default=None)
        state = sum(file.stat().st_size for file in newest.rglob("*.*")) if newest else 0
    return Played(
        example=cell.example,
        level=cell.level,
        seed=cell.seed,
        before=before,
        after=after,
        cpu_s=round(used.ru_utime + used.ru_stime, 2),
        peak_mib=round(used.ru_maxrss * 1024 / MIB, 2),
        state_mib=round(state / MIB, 2),
    )


def rows_of(found: Sequence[Played]) -> Iterator[list[str]]:
    """A row for each example and level."""
    for example in AGENTS:
        for level in LEVELS:
            if runs := [one for one in found if (one.example, one.level) == (example, level)]:
                after = [one.after for one in runs]
                yield [
                    example,
                    level,
                    str(len(runs)),
                    f"{statistics.fmean(one.before for one in runs):.3f}",
                    f"{statistics.fmean(after):.3f}",
                    f"{min(after):.3f}",
                    f"{statistics.fmean(one.cpu_s for one in runs):.0f}",
                    f"{statistics.fmean(one.peak_mib for one in runs):.0f}",
                    f"{statistics.fmean(one.state_mib for one in runs):.1f}",
                    " ".join(f"{one.after:.3f}" for one in sorted(runs, key=lambda one: one.seed)),
                ]


def l2_vs_l3(found: Sequence[Played], of: Callable[[Played], float]) -> float:
    """The mean over the examples of a figure of L2 by that of L3; NaN where one of them was not played."""

    def mean(example: str, level: str) -> float:
        figures = [of(one) for one in found if (one.example, one.level) == (example, level)]
        return statistics.fmean(figures) if figures else math.nan

    return statistics.fmean(mean(example, "L2") / mean(example, "L3") for example in AGENTS)


def main() -> None:
    """Runs what is missing, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--examples", nargs="+", choices=AGENTS, default=[*AGENTS], help="which (default all)")
    options.add_argument("--levels", nargs="+", choices=LEVELS, default=[*LEVELS], help="which (default all)")
    options.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS], help="which (default 1 to 3)")
    options.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default one a core)")
    options.add_argument("--kept", type=Path, default=KEPT, help="file of the runs that ended (default beside this)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    ended = {one.cell for one in kept_in(chosen.kept, Played)}
    wanted = [
        Cell(seed, level, example) for seed in chosen.seeds for level in chosen.levels for example in chosen.examples
    ]
    play_all([cell for cell in wanted if cell not in ended], play, chosen.kept, jobs=chosen.jobs)
    found = kept_in(chosen.kept, Played)
    report(
        "What a team learns and costs, by level",
        ["example", "level", "seeds", "before", "after", "least", "CPU s", "peak MiB", "state MiB", "after, by seed"],
        [*rows_of(found)],
        {
            "success_l2_vs_l3": l2_vs_l3(found, lambda one: one.after),
            "cpu_l2_vs_l3": l2_vs_l3(found, lambda one: one.cpu_s),
            "state_l2_vs_l3": l2_vs_l3(found, lambda one: one.state_mib),
        },
        as_json=chosen.json,
    )


if __name__ == "__main__":
    main()
