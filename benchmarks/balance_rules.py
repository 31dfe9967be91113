"""Rules that move instances between policies, in the simulated world: step times on workloads of several shapes.

    python benchmarks/balance_rules.py --json

The production loops and rules play; only devices are modelled. Rules are compared on the same tasks, whose calls are
the same in every system, with the same start of a step and the same interval between decisions. The first step, in
which nothing is known of the policies, counts too.

    store      eight agents on 32 instances; two of them get 76% of the calls, lengths have a long tail
    crowded    the same with three times as many trajectories at a time
    even       eight agents with equal shares: nothing to be won, something to be lost
    few        three agents on 12 instances, one of which gets 70%
    tail       the store with responses whose longest are twenty times the mean
    tools      the store with tools that take ten times as long as the calls
    slow       the store on devices whose moves take as long as a step's median trajectory

    vs_queue_gap           geometric mean over shapes and seeds of our step time by that of `queue_gap`, same start
    worst_shape            the largest of its means over the seeds of one shape
    vs_none                our step time by that without a rule
    by_share_vs_queue_gap  the first figure where each step begins with instances in proportion to the work
    vs_fitted              ours with start: by_share by `queue_gap` as configured, which is what the paper has
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from common import report

from flexmarl.analysis.facts import read_facts
from flexmarl.assemble.simulation import simulate
from flexmarl.config import RunSettings
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Moved

STORE = {
    "router": 0.44,
    "search": 0.32,
    "orders": 0.06,
    "stock": 0.05,
    "prices": 0.04,
    "returns": 0.04,
    "advice": 0.03,
    "greeting": 0.02,
}
STEPS, GROUPS, EPISODES = 6, 16, 4


@dataclass(frozen=True)
class Shape:
    """A workload and its devices."""

    shares: Mapping[str, float] = field(default_factory=lambda: STORE)
    instances: int = 4
    """Of each policy, as configured."""
    at_once: int = GROUPS
    """Groups at a time."""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """What differs from the common workload."""
    move_s: float = 2.5


SHAPES = {
    "store": Shape(),
    "crowded": Shape(at_once=3 * GROUPS),
    "even": Shape(shares=dict.fromkeys(STORE, 0.125)),
    "few": Shape(shares={"solver": 0.7, "critic": 0.2, "judge": 0.1}),
    "tail": Shape(tasks={"sigma_call": 1.6}),
    "tools": Shape(tasks={"tool_mean_s": 30.0}),
    "slow": Shape(move_s=15.0),
}
RULES = ("none", "queue_gap", "drain_time")
STARTS = ("as_configured", "by_share")
WANTED_AT_MOST = {"vs_queue_gap": 1.0, "worst_shape": 1.02, "by_share_vs_queue_gap": 1.0}


@dataclass(frozen=True, order=True)
class Cell:
    """A simulated run."""

    shape: str
    seed: int
    rule: str
    start: str


@dataclass(frozen=True)
class Played:
    """What it showed."""

    step_s: float
    """Mean time of a step's rollout."""
    moves: int


def settings_of(cell: Cell, out: str) -> RunSettings:
    """The run's config."""
    shape = SHAPES[cell.shape]
    groups = shape.at_once
    engine = {"slots": 5, "decode_s": 0.01, "decode_request_s": 0.002, "prefill_steps": 15, "move_s": shape.move_s}
    return RunSettings.model_validate(
        {
            "seed": cell.seed,
            "steps": STEPS,
            "out": out,
            "code": [],
            "mode": "sync",
            "cluster": {"backend": "simulated"},
            "batch": {"groups": groups, "episodes": EPISODES},
            "rollout": {
                "inter_query": groups,
                "intra_query": EPISODES,
                "episode_timeout_s": 36000,
                "call_timeout_s": 36000,
            },
            "pool": {"max_running": 5, "on_move": "continue"},
            "balance": {"rule": cell.rule, "start": cell.start, "poll_s": 1.0},
            "credit": {"filter": None},
            "evaluate": {"tasks": 0},
            "checkpoint": {"every": 0},
            "tasks": {
                "type": "generator",
                "name": "workload",
                "params": {
                    "agents": shape.shares,
                    "turns_min": 3,
                    "turns_extra": 2.0,
                    "sigma_query": 0.4,
                    "sigma_traj": 0.3,
                    **shape.tasks,
                },
            },
            "policies": {name: {"model": "none", "instances": shape.instances} for name in shape.shares},
            "team": {
                "workflow": {"type": "custom", "name": "call_graph"},
                "agents": {name: {"policy": name, "sampling": {"max_tokens": 8192}} for name in shape.shares},
            },
            "simulation": {
                "costs": {"default": {"origin": "chosen for this benchmark", "engine": engine}},
                "replies": {"default": {"type": "asked"}},
            },
        }
    )


def play(cell: Cell) -> Played:
    """Simulates one run."""
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder(simulate(settings_of(cell, out)))
        events = list(read_run(folder.journal))
    facts = read_facts(events)
    spans = [ended - began for began, ended in facts.rollouts]
    return Played(statistics.fmean(spans), sum(isinstance(event, Moved) for event in events))


def ratio(found: Mapping[Cell, Played], cells: Iterable[tuple[Cell, Cell]]) -> float:
    """Geometric mean of the step time of the first of each pair by that of the second."""
    return math.exp(statistics.fmean(math.log(found[ours].step_s / found[theirs].step_s) for ours, theirs in cells))


def compared(
    shapes: Sequence[str], seeds: Sequence[int], ours: tuple[str, str], theirs: tuple[str, str]
) -> list[tuple[Cell, Cell]]:
    """The pairs of two systems, each a rule and a start."""
    return [(Cell(shape, seed, *ours), Cell(shape, seed, *theirs)) for shape in shapes for seed in seeds]


def main() -> None:
    """Plays all, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=4, help="seeds of each workload (default 4)")
    options.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default one a core)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    seeds = range(1, chosen.seeds + 1)
    cells = [Cell(shape, seed, rule, start) for shape in SHAPES for seed in seeds for rule in RULES for start in STARTS]
    with ProcessPoolExecutor(chosen.jobs) as processes:
        found = dict(zip(cells, processes.map(play, cells), strict=True))
    pairs = partial(compared, [*SHAPES], seeds)
    ours, theirs = ("drain_time", "as_configured"), ("queue_gap", "as_configured")
    ours_shared, theirs_shared = ("drain_time", "by_share"), ("queue_gap", "by_share")
    by_shape = {shape: ratio(found, compared([shape], seeds, ours, theirs)) for shape in SHAPES}
    report(
        f"Seconds of a step's rollout, mean of {chosen.seeds} seeds; moves of a run in brackets",
        ["start", "shape", *RULES, "ours by queue_gap"],
        [row(found, start, shape, seeds) for start in STARTS for shape in SHAPES],
        {
            "vs_queue_gap": ratio(found, pairs(ours, theirs)),
            "worst_shape": max(by_shape.values()),
            "vs_none": ratio(found, pairs(ours, ("none", "as_configured"))),
            "by_share_vs_queue_gap": ratio(found, pairs(ours_shared, theirs_shared)),
            "vs_fitted": ratio(found, pairs(ours_shared, theirs)),
        },
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


def row(found: Mapping[Cell, Played], start: str, shape: str, seeds: Iterable[int]) -> list[str]:
    """One shape."""

    def shown(rule: str) -> str:
        runs = [found[Cell(shape, seed, rule, start)] for seed in seeds]
        return f"{statistics.fmean(one.step_s for one in runs):.1f} [{statistics.fmean(one.moves for one in runs):.0f}]"

    mean = ratio(found, compared([shape], [*seeds], ("drain_time", start), ("queue_gap", start)))
    return [start, shape, *map(shown, RULES), f"{mean:.3f}"]


if __name__ == "__main__":
    main()
