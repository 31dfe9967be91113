"""Publication rules on a long-tailed workload: how often weights are published, how fast steps are, how stale tokens.

    python benchmarks/publication.py --json

The production loops and rules play in the simulated world, in mode `async` with `pipeline.lag: auto` and with the lags
1 and 3, on the workload of `async_modes.py`, which was chosen before these rules existed. Each publication takes the
trainer a second. A rule is `pipeline.publish.type` with its other settings at their defaults.

    publications_*       a rule's publications by those of eager: the largest of all lags and seeds
    step_time_*          its seconds per step by those of eager: the mean over lags and seeds
    staleness_by_bound   largest staleness of all rules by the bound of its rule and lag: never more than 1
    staleness_*          its mean staleness by eager's: the price
"""

import argparse
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

from async_modes import EPISODES, GROUPS, Cell, Lag, Played, play
from common import report

RULES = ("eager", "lazy", "adaptive")
LAGS: tuple[Lag, ...] = (1, 3, "auto")
SEEDS = (1, 2)
NAMES = {
    "lazy": ("publications_lazy", "step_time_lazy", "staleness_lazy"),
    "adaptive": ("publications_adaptive", "step_time_adaptive", "staleness_adaptive"),
}
"""The figures of a rule."""
WANTED_AT_MOST = {"publications_adaptive": 0.5, "step_time_adaptive": 1.0, "staleness_by_bound": 1.0}


def main() -> None:
    """Plays all rules, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60, help="steps of each run (default 60)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    runs = [(Cell("async", lag, publish=rule), seed) for lag, rule, seed in product(LAGS, RULES, SEEDS)]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        played = processes.map(partial(_play, steps=chosen.steps), runs)
        found = dict(zip(runs, played, strict=True))
    report(
        f"{chosen.steps} steps of {GROUPS} tasks, {EPISODES} episodes each, seeds {SEEDS}",
        ["", "lag", "publications", "s per step", "staleness", "at most"],
        [_row(found, lag, rule) for lag, rule in product(LAGS, RULES)],
        _figures(found),
        as_json=chosen.json,
        wanted={},
        wanted_at_most=WANTED_AT_MOST,
    )


def _play(run: tuple[Cell, int], *, steps: int) -> Played:
    return play(run[0], steps, run[1])


def _of(found: Mapping[tuple[Cell, int], Played], lag: Lag, rule: str) -> list[Played]:
    return [found[Cell("async", lag, publish=rule), seed] for seed in SEEDS]


def _row(found: Mapping[tuple[Cell, int], Played], lag: Lag, rule: str) -> list[str]:
    played = _of(found, lag, rule)
    bounds = sorted({one.bound or 0 for one in played})
    return [
        rule,
        f"{lag}",
        f"{statistics.fmean(one.publications for one in played):.0f}",
        f"{statistics.fmean(one.step_s for one in played):.2f}",
        f"{statistics.fmean(one.mean_staleness for one in played):.2f}",
        f"{max(one.max_staleness for one in played):.0f} of {bounds[-1]}",
    ]


def _figures(found: Mapping[tuple[Cell, int], Played]) -> dict[str, float]:
    figures = {"staleness_by_bound": max(one.max_staleness / one.bound for one in found.values() if one.bound)}
    for rule, (publications, step_time, staleness) in NAMES.items():
        pairs = [pair for lag in LAGS for pair in zip(_of(found, lag, rule), _of(found, lag, "eager"), strict=True)]
        figures |= {
            publications: max(one.publications / eager.publications for one, eager in pairs),
            step_time: statistics.fmean(one.step_s / eager.step_s for one, eager in pairs),
            staleness: statistics.fmean(one.mean_staleness / eager.mean_staleness for one, eager in pairs),
        }
    return figures


if __name__ == "__main__":
    main()
