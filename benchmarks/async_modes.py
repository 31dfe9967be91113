"""Asynchronous modes on one long-tailed workload: how fast they train, how stale, and whom they leave out.

    python benchmarks/async_modes.py --json

The production loops and rules play in the simulated world. The workload, chosen before any result was seen: 60 steps of
16 tasks with 4 episodes each; two agents with a policy each, 70% of the calls go to the solver; 2 to 8 calls an
episode; lognormal response lengths with mean 300, whose logarithm has a standard deviation of 0.8 between tasks, 0.3
between episodes of a task and 0.6 between calls, so that one task in a hundred is more than four times as long as the
mean one; 3 instances and 1 instance of 16 slots. The longest tasks take several steps' time.

The figures without a lag in their name are those of windowed FIFO with the default window, 0.3 of the active groups, at
the lag of this rule: `lag + 1` steps last as long as all but one task in a thousand, where greedy at lag 1 shows how
long a step lasts if it never waits for a task, and how long tasks last. The table has other lags and windows beside it,
and runs with `pipeline.lag: auto`, which begin with lag 1 and follow the rule by what they measure themselves.

    throughput_vs_*        tokens trained per second, windowed FIFO by another mode (greedy and fifo at the same lag)
    *_lag_1                the same at lag 1
    *_lag_auto             the same with `pipeline.lag: auto`, both runs
    throughput_auto_vs_*   windowed FIFO with `pipeline.lag: auto` by itself at lag 1, and at the lag of the rule
    lag_auto, *_step       the last lag of windowed FIFO with `pipeline.lag: auto`, and the step that began with it
    length_ratio           windowed FIFO: mean tokens of the trained tasks by that of the admitted ones, all steps
    early_ratio, *_greedy  the same for the first six steps, where a mode that takes what finishes first shows
    length_ratio_dropped   windowed FIFO at lag 1 that drops a task which holds up others for longer than half a minute
    staleness_by_bound     largest staleness, of all modes and lags with a bound, by that bound
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from common import report

from flexmarl.analysis.facts import read_facts
from flexmarl.assemble.simulation import simulate
from flexmarl.config import RunSettings
from flexmarl.events.group_events import GroupAdmitted, GroupExpired, LagChanged
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.staleness import LengthBias, length_bias
from flexmarl.orchestrator.settings import Mode, PipelineSettings, law_of
from flexmarl.rollout.admission import AdmissionLaw
from flexmarl.simulator.workload import plan_of

GROUPS, EPISODES, EARLY = 16, 4, 6
WORKLOAD = {
    "agents": {"solver": 0.7, "critic": 0.3},
    "turns_min": 2,
    "turns_extra": 1.0,
    "turns_max": 8,
    "len_mean": 300.0,
    "len_cap": 8192,
    "sigma_query": 0.8,
    "sigma_traj": 0.3,
    "sigma_call": 0.6,
    "tool_mean_s": 0.5,
}
COSTS = {
    "origin": "chosen for this benchmark",
    "engine": {"slots": 16, "decode_s": 0.01, "decode_request_s": 0.0005},
    "trainer": {"sample_s": 0.2, "update_s": 1.0, "publish_s": 1.0},
}
Lag = int | Literal["auto"]
LAGS: tuple[Lag, ...] = (1, 3, "auto")
"""Beside the one of the rule. auto: the run follows the rule by itself."""
LONGER = 0.001
"""Share of the tasks that may last for longer than `lag + 1` steps."""
WANTED = {"throughput_vs_greedy": 0.95, "length_ratio": 0.95}
WANTED_AT_MOST = {"length_ratio": 1.05}


@dataclass(frozen=True)
class Cell:
    """A setting of the pipeline."""

    mode: str
    lag: Lag = 1
    window: float = 0.3
    deadline_s: float = 1800.0
    """A head that holds up others for longer is dropped."""
    publish: str = "eager"
    """The rule of `pipeline.publish`."""

    @property
    def name(self) -> str:
        """For the table."""
        if self.deadline_s < Cell.deadline_s:
            return "dropping"
        return f"async {self.window:g}" if self.mode == "async" else self.mode

    @property
    def pipeline(self) -> dict[str, Any]:
        """The settings behind `pipeline`."""
        publish = {"type": self.publish}
        return {"lag": self.lag, "window": self.window, "head_deadline_s": self.deadline_s, "publish": publish}

    def law(self, lag: int) -> AdmissionLaw:
        """The law with its bound on staleness; at `lag` if the run chooses it."""
        return law_of(Mode(self.mode), PipelineSettings(**self.pipeline), groups=GROUPS, now=lag)


PROBE = Cell("greedy")
ON_POLICY = (Cell("sync"), Cell("microbatch"))
ONE_STEP_OFF = Cell("one_step_off")
DROPPING = Cell("async", deadline_s=30.0)


def at(lag: Lag) -> tuple[Cell, ...]:
    """The modes whose lag is free."""
    return Cell("greedy", lag), Cell("async", lag), Cell("async", lag, window=0.5), Cell("fifo", lag)


@dataclass(frozen=True)
class Played:
    """What a run showed."""

    tokens_per_s: float
    """Trained."""
    lag: int
    """The last one."""
    lag_step: int
    """The step that began with it, from 0."""
    bound: int | None
    """On staleness, at the largest lag."""
    step_s: float
    long_task_s: float
    """From admission to the last answer; all but `LONGER` of the tasks last no longer."""
    max_staleness: float
    """Versions between sampling a token and training on it; of the solver."""
    dropped: int
    """Tasks that ended untrained before the run did."""
    mean_staleness: float
    """Mean over the steps; of the solver."""
    publications: int
    """Of both policies, without the weights that the run began with."""
    bias: LengthBias
    """Tasks trained against tasks admitted."""
    early: LengthBias
    """The same up to the end of step `EARLY`."""


def settings_of(cell: Cell, out: str, *, steps: int, seed: int) -> RunSettings:
    """The run's config."""
    return RunSettings.model_validate(
        {
            "seed": seed,
            "steps": steps,
            "out": out,
            "code": [],
            "cluster": {"backend": "simulated"},
            "batch": {"groups": GROUPS, "episodes": EPISODES},
            "rollout": {
                "inter_query": cell.law(PipelineSettings().max_lag).slots,
                "episode_timeout_s": 36000,
                "call_timeout_s": 36000,
            },
            "credit": {"filter": None},
            "evaluate": {"tasks": 0},
            "checkpoint": {"every": 0},
            "tasks": {"type": "generator", "name": "workload", "params": WORKLOAD},
            "policies": {
                "solver": {"model": "modelled", "instances": 3},
                "critic": {"model": "modelled", "instances": 1},
            },
            "team": {
                "workflow": {"type": "custom", "name": "call_graph"},
                "agents": {
                    name: {"policy": name, "sampling": {"max_tokens": WORKLOAD["len_cap"]}}
                    for name in ("solver", "critic")
                },
            },
            "simulation": {"costs": {"default": COSTS}, "replies": {"default": {"type": "asked"}}},
            "mode": cell.mode,
            "pipeline": cell.pipeline,
        }
    )


def play(cell: Cell, steps: int, seed: int) -> Played:
    """Plays one setting."""
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder(simulate(settings_of(cell, out, steps=steps, seed=seed)))
        events = list(read_run(folder.journal))
        facts = read_facts(events)
        metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    end = facts.steps[-1].ended
    changes = [event for event in events if isinstance(event, LagChanged)]
    lags = [cell.law(1).lag, *(change.lag for change in changes)]
    admitted = {event.group: event.t for event in events if isinstance(event, GroupAdmitted)}
    tokens = {group: task_tokens(group, seed) for group in admitted}
    trained = [group for step in facts.steps for group in step.trained]
    lasted = {
        call.group: call.ended - admitted[call.group] for call in sorted(facts.calls, key=lambda call: call.ended)
    }
    early, early_end = facts.steps[:EARLY], facts.steps[EARLY - 1].ended
    return Played(
        tokens_per_s=sum(tokens[group] for group in trained) / end,
        lag=lags[-1],
        lag_step=changes[-1].step if changes else 0,
        bound=cell.law(max(lags)).max_staleness,
        step_s=end / steps,
        long_task_s=float(np.quantile(list(lasted.values()), 1 - LONGER)),
        max_staleness=max(line.get("staleness/solver/max", 0.0) for line in metrics),
        mean_staleness=statistics.fmean(line.get("staleness/solver/mean", 0.0) for line in metrics),
        publications=sum(one.version > 0 for one in facts.publications),
        dropped=sum(isinstance(event, GroupExpired) and event.t < end for event in events),
        bias=bias_of([tokens[group] for group in trained], list(tokens.values())),
        early=bias_of(
            [tokens[group] for step in early for group in step.trained],
            [tokens[group] for group, at in admitted.items() if at < early_end],
        ),
    )


def task_tokens(group: int, seed: int) -> float:
    """What the task of a group asks for, over all its episodes; no task is admitted twice here."""
    plan = plan_of(WORKLOAD, seed, group, "train")
    return float(sum(call.tokens for episode in range(EPISODES) for call in plan.calls(episode)))


def bias_of(trained: Sequence[float], admitted: Sequence[float]) -> LengthBias:
    """Both are there."""
    found = length_bias(trained, admitted)
    assert found is not None
    return found


def lag_of(probe: Played) -> int:
    """The smallest lag for which `lag + 1` steps last as long as all but a few tasks."""
    return max(1, math.ceil(probe.long_task_s / probe.step_s) - 1)


def main() -> None:
    """Plays all settings, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60, help="steps of each setting (default 60)")
    options.add_argument("--seed", type=int, default=1, help="of the workload (default 1)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    run = partial(play, steps=chosen.steps, seed=chosen.seed)
    cells = [cell for lag in LAGS for cell in at(lag)] + [DROPPING, ONE_STEP_OFF, *ON_POLICY]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        found = dict(zip(cells, processes.map(run, cells), strict=True))
        lag = lag_of(found[PROBE])
        cells = [cell for cell in at(lag) if cell not in found]
        found |= zip(cells, processes.map(run, cells), strict=True)
    report(
        f"{chosen.steps} steps of {GROUPS} tasks, {EPISODES} episodes each",
        ["", "lag", "tokens/s", "staleness", "dropped", "length", "KS", "first"],
        [row(cell, found[cell]) for cell in sorted(found, key=lambda cell: (cell.lag == "auto", found[cell].lag))],
        figures_of(found, lag),
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def figures_of(found: Mapping[Cell, Played], lag: int) -> dict[str, float]:
    """What the docstring of the module tells."""
    ours, first = found[Cell("async", lag)], found[Cell("async")]
    greedy, others = found[Cell("greedy", lag)], [Cell("fifo", lag), ONE_STEP_OFF, *ON_POLICY]
    auto, greedy_auto = found[Cell("async", "auto")], found[Cell("greedy", "auto")]
    return {
        "lag": lag,
        "throughput_vs_greedy": ours.tokens_per_s / greedy.tokens_per_s,
        **{f"throughput_vs_{other.mode}": ours.tokens_per_s / found[other].tokens_per_s for other in others},
        "throughput_vs_greedy_lag_1": first.tokens_per_s / found[PROBE].tokens_per_s,
        "throughput_vs_greedy_lag_auto": auto.tokens_per_s / greedy_auto.tokens_per_s,
        "throughput_auto_vs_lag_1": auto.tokens_per_s / first.tokens_per_s,
        "throughput_auto_vs_rule": auto.tokens_per_s / ours.tokens_per_s,
        "lag_auto": auto.lag,
        "lag_auto_step": auto.lag_step,
        "length_ratio": ours.bias.ratio,
        "length_ratio_lag_1": first.bias.ratio,
        "length_ratio_lag_auto": auto.bias.ratio,
        "early_ratio": ours.early.ratio,
        "early_ratio_greedy": greedy.early.ratio,
        "length_ratio_dropped": found[DROPPING].bias.ratio,
        "staleness_by_bound": max(one.max_staleness / one.bound for one in found.values() if one.bound),
    }


def row(cell: Cell, played: Played) -> list[str]:
    """One setting."""
    return [
        cell.name,
        f"1 to {played.lag}" if cell.lag == "auto" else f"{played.lag}",
        f"{played.tokens_per_s:.0f}",
        f"{played.max_staleness:.0f}" + ("" if played.bound is None else f" of {played.bound}"),
        f"{played.dropped}",
        f"{played.bias.ratio:.3f}",
        f"{played.bias.ks:.3f}",
        f"{played.early.ratio:.3f}",
    ]


if __name__ == "__main__":
    main()
