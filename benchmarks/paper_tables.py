"""FlexMARL's Tables 2, 3 and 4 on modelled devices, beside what the paper prints.

    python benchmarks/paper_tables.py --json
    python benchmarks/paper_tables.py --rules ours --json

The systems and workloads are the configs in examples/paper, played by the production loops and rules in the simulated
world. A step is one global batch, 4 queries of 16 trajectories, and ends with the publication of its weights: steps are
independent of each other, except under our rules, where the rollout of a step begins before the policies of the step
before are published. Single steps are not ordered as their means are. The workloads were fitted on other steps.

    worst_cell_error   largest relative error of a mean step time, over the twelve cells of Tables 2 and 3
    order_kept         1 if on both data sets the systems stand in the paper's order of step times
    ours_vs_paper_*    mean step time under the paper's rules for instances and process groups, by that under ours; the
                       same steps, the same readiness of rows, and no lengths but those that were observed
    bound_ratio_*      mean step time under ours by the lower bound of the mean of the same steps
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from common import report
from rich.console import Console
from rich.table import Table

from flexmarl.analysis.bound import bounds_of, mean_bound
from flexmarl.analysis.costs import costs_of
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.analysis.figures import Pools, report_of
from flexmarl.assemble.simulation import simulate
from flexmarl.config import RunSettings, load_run
from flexmarl.events.journal import read_run
from flexmarl.events.overlap import seconds
from flexmarl.events.run_folder import RunFolder
from flexmarl.orchestrator.settings import Mode

EXAMPLES = Path(__file__).parents[1] / "examples" / "paper"
PRINTED: Mapping[str, Mapping[str, Mapping[str, float]]] = yaml.safe_load((EXAMPLES / "printed.yaml").read_text())
DEVICES = {"ma": 104, "ca": 108}
"""Of every system on a data set: utilisation is a share of these."""
POLICIES = {"ma": "abcde", "ca": "abcd"}
PAPERS, WORDED, OURS = "paper", "as worded", "ours"
RESAMPLES = 10_000
WANTED = {"order_kept": 1.0, "ours_vs_paper_ma": 1.05, "ours_vs_paper_ca": 1.10}
WANTED_AT_MOST = {"worst_cell_error": 0.15}


@dataclass(frozen=True)
class Run:
    """One config to play."""

    config: str
    """Below examples/paper, without suffix: `ma/flexmarl`."""
    steps: int
    seed: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Played:
    """What a run showed."""

    step_s: Sequence[float]
    """Of each step, in order."""
    bound_s: float | None
    """No schedule is faster on average. None where engines and trainers have the same devices in turns."""
    rollout_s: float
    training_s: float
    """Visible."""
    tokens_per_s: float
    device_s: float
    """Devices at work, times seconds; per step."""
    moves: float
    """Of instances; per step."""

    @property
    def mean_s(self) -> float:
        """Mean step time."""
        return fmean(self.step_s)


def play(run: Run) -> Played:
    """Plays one config in the simulated world."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"steps={run.steps}", f"seed={run.seed}", f"out={folder}", *run.overrides]
        settings = load_run(EXAMPLES / f"{run.config}.yaml", overrides)
        facts = read_facts(read_run(RunFolder(simulate(settings, show=lambda text: None)).journal))
    found = report_of(facts, Pools(costs=settings.simulation.costs))
    assert found is not None
    assert found.steps == run.steps
    return Played(
        step_s=[step.ended - step.began for step in facts.steps],
        bound_s=None if settings.mode is Mode.COLOCATED else lower_bound(settings, facts),
        rollout_s=found.rollout_s,
        training_s=found.training_s,
        tokens_per_s=found.tokens_per_s,
        device_s=device_seconds(settings, facts) / run.steps,
        moves=found.moves / run.steps,
    )


def lower_bound(settings: RunSettings, facts: Facts) -> float:
    """Of the mean step."""
    bounds = bounds_of(
        facts,
        settings.simulation.costs,
        instances=len(facts.instances),
        trainers_at_once=settings.process_groups.at_once,
        trained=settings.trained,
        ahead=settings.pipeline.ahead,
    )
    mean = mean_bound(bounds)
    assert mean is not None
    return mean.total_s


def device_seconds(settings: RunSettings, facts: Facts) -> float:
    """Engines with a request, by their share of activity, and trainers that compute."""
    costs = settings.simulation.costs
    serving = 0.0
    for instance, busy in facts.serving().items():
        engine = costs_of(costs, instance.policy).engine
        serving += seconds(busy) * engine.devices * engine.busy_share
    return serving + sum(
        seconds(busy) * costs_of(costs, policy).trainer.devices for policy, busy in facts.training().items()
    )


def play_all(runs: Mapping[str, Run]) -> dict[str, Played]:
    """Plays them side by side, a core for each."""
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        return dict(zip(runs, processes.map(play, runs.values()), strict=True))


def show_tables(chosen: argparse.Namespace) -> None:
    """Tables 2, 3 and 4 beside the paper's."""
    cells = {f"{table}/{row}": printed for table, rows in PRINTED.items() for row, printed in rows.items()}
    played = play_all({cell: Run(cell, chosen.steps, chosen.seed) for cell in cells})
    fitted = {cell: printed for cell, printed in cells.items() if cell.partition("/")[0] in DEVICES}
    show_table_4({cell: printed for cell, printed in cells.items() if cell not in fitted}, played)
    report(
        f"Tables 2 and 3: printed, and simulated (means of {chosen.steps} steps)",
        ["", "step, s", "simulated", "std", "error", "tokens/s", "simulated", "utilisation", "simulated"],
        [row(cell, printed, played[cell]) for cell, printed in fitted.items()],
        {
            "worst_cell_error": max(abs(error(played[cell], printed)) for cell, printed in fitted.items()),
            "order_kept": float(all(in_order([played[f"{data}/{row}"] for row in PRINTED[data]]) for data in DEVICES)),
            **{f"step_s_{cell.replace('/', '_')}": played[cell].mean_s for cell in cells},
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def row(cell: str, printed: Mapping[str, float], played: Played) -> list[str]:
    """One cell of Table 2 or 3."""
    utilisation = played.device_s / played.mean_s / DEVICES[cell.partition("/")[0]]
    return [
        cell,
        f"{printed['step_s']:.1f}",
        f"{played.mean_s:.1f}",
        f"{stdev(played.step_s):.1f}",
        f"{error(played, printed):+.1%}",
        f"{printed['tokens_per_s']:.0f}",
        f"{played.tokens_per_s:.0f}",
        f"{printed['utilisation']:.1%}" if "utilisation" in printed else "",
        f"{utilisation:.1%}",
    ]


def show_table_4(cells: Mapping[str, Mapping[str, float]], played: Mapping[str, Played]) -> None:
    """Nothing is fitted to Table 4."""
    table = Table("", "rollout, s", "simulated", "training, s", "simulated", "step, s", "simulated", title="Table 4")
    for cell, printed in cells.items():
        one = played[cell]
        pairs = ((printed["rollout_s"], one.rollout_s), (printed["training_s"], one.training_s))
        pairs = (*pairs, (printed["step_s"], one.mean_s))
        table.add_row(cell, *(f"{value:.1f}" for pair in pairs for value in pair))
    Console().print(table)


def error(played: Played, printed: Mapping[str, float]) -> float:
    """Relative error of the mean step time."""
    return played.mean_s / printed["step_s"] - 1


def in_order(slowest_first: Sequence[Played]) -> bool:
    """Whether each is faster on average than the one before."""
    return all(slower.mean_s > faster.mean_s for slower, faster in pairwise(slowest_first))


def show_rules(chosen: argparse.Namespace) -> None:
    """The paper's rules against ours, step by step."""
    rules = {f"{data}: {name}": run for data in DEVICES for name, run in rules_on(data, chosen).items()}
    played = play_all(rules)
    figures: dict[str, float] = {}
    rows: list[list[str]] = []
    for data in DEVICES:
        paper, ours = played[f"{data}: {PAPERS}"], played[f"{data}: {OURS}"]
        figures[f"ours_vs_paper_{data}"] = paper.mean_s / ours.mean_s
        low, high = interval(paper.step_s, ours.step_s)
        figures |= {f"ours_vs_paper_{data}_low": low, f"ours_vs_paper_{data}_high": high}
        figures[f"bound_ratio_{data}"] = by_bound(ours)
        rows += [rule_row(name, played[name], paper) for name in rules if name.startswith(data)]
    report(
        f"The paper's rules and ours on the same {chosen.steps} steps; 95% intervals of the ratio of means, paired",
        ["", "step, s", "rollout", "training", "moves", "gain", "95%", "bound", "step / bound"],
        rows,
        figures,
        as_json=chosen.json,
        wanted=WANTED,
    )


def rules_on(data: str, chosen: argparse.Namespace) -> dict[str, Run]:
    """Sets of rules by name, on one data set."""

    def run(system: str, *overrides: str) -> Run:
        return Run(f"{data}/{system}", chosen.steps, chosen.seed, overrides)

    return {
        PAPERS: run("flexmarl"),
        WORDED: run("flexmarl", "balance.rule=queue_gap_literal"),
        OURS: run("ours"),
        "ours, not ahead": run("ours", "pipeline.ahead=false"),
        "ours, 8 rows": run("ours", *(f"policies.{p}.training.micro_batch=8" for p in POLICIES[data])),
    }


def rule_row(name: str, played: Played, paper: Played) -> list[str]:
    """One set of rules on one data set."""
    low, high = interval(paper.step_s, played.step_s)
    return [
        name,
        f"{played.mean_s:.1f}",
        f"{played.rollout_s:.1f}",
        f"{played.training_s:.1f}",
        f"{played.moves:.1f}",
        f"{paper.mean_s / played.mean_s:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{played.bound_s:.1f}",
        f"{by_bound(played):.2f}",
    ]


def by_bound(played: Played) -> float:
    """Mean step time by its lower bound."""
    assert played.bound_s
    return played.mean_s / played.bound_s


def interval(slower: Sequence[float], faster: Sequence[float]) -> tuple[float, float]:
    """95% of the ratio of means, by resampling steps: both systems played each of them."""
    times: Any = np.array([slower, faster])
    drawn = np.random.default_rng(0).integers(0, times.shape[1], (RESAMPLES, times.shape[1]))
    means = times[:, drawn].mean(axis=2)
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    """Plays what is asked for, prints the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rules", choices=("paper", "ours"), default="paper", help="paper: Tables 2 to 4 (default)")
    options.add_argument("--steps", type=int, default=64, help="steps of each run (default 64)")
    options.add_argument("--seed", type=int, default=1, help="of the workload (default 1)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    (show_tables if chosen.rules == "paper" else show_rules)(chosen)


if __name__ == "__main__":
    main()
