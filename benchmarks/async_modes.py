"""Asynchronous modes on one long-tailed workload: how fast they train, how stale, and whom they leave out.

    python benchmarks/async_modes.py --json

The production loops and rules play in the simulated world. The workload, chosen before any result was seen: 60 steps of
16 tasks with 4 episodes each; two agents with a policy each, 70% of the calls go to the solver; 2 to 8 calls an
episode; lognormal response lengths with mean 300, whose logarithm has a standard deviation of 0.8 between tasks, 0.3
between episodes of a task and 0.6 between calls, so that one task in a hundred is more than four times as long as the
mean one; 3 instances and 1 instance of 16 slots. The longest tasks take several steps' time. Asynchronous modes may be
`--lag` steps ahead; the window is 0.3 of the active groups.

    throughput_vs_*        tokens trained per second, windowed FIFO by another mode
    length_ratio           windowed FIFO: mean tokens of the trained tasks by that of the admitted ones, all steps
    early_ratio, *_greedy  the same for the first six steps, where a mode that takes what finishes first shows
    length_ratio_dropped   windowed FIFO that drops a task which holds up others for longer than half a minute
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from common import report

from flexmarl.assemble import simulate
from flexmarl.config import RunSettings
from flexmarl.experience.staleness import LengthBias, length_bias
from flexmarl.observability.journal import read_run
from flexmarl.observability.run_folder import RunFolder
from flexmarl.simulator.facts import read_facts
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
MODES: Mapping[str, Mapping[str, Any]] = {
    "windowed FIFO": {"mode": "async"},
    "fifo": {"mode": "fifo"},
    "greedy": {"mode": "greedy"},
    "one_step_off": {"mode": "one_step_off"},
    "microbatch": {"mode": "microbatch"},
    "sync": {"mode": "sync"},
    "late dropped": {"mode": "async", "pipeline": {"head_deadline_s": 30.0}},
}
WANTED = {"throughput_vs_greedy": 0.95, "length_ratio": 0.95}
WANTED_AT_MOST = {"length_ratio": 1.05}


@dataclass(frozen=True)
class Played:
    """What a run showed."""

    tokens_per_s: float
    """Trained."""
    step_s: float
    mean_staleness: float
    """Versions between sampling a token and training on it; of the solver."""
    max_staleness: float
    dropped: int
    """Tasks that ended untrained before the run did."""
    bias: LengthBias
    """Tasks trained against tasks admitted."""
    early: LengthBias
    """The same up to the end of step `EARLY`."""


def settings_of(mode: Mapping[str, Any], out: str, *, steps: int, seed: int, lag: int) -> RunSettings:
    """The run's config."""
    return RunSettings.model_validate(
        {
            "seed": seed,
            "steps": steps,
            "out": out,
            "code": [],
            "cluster": {"backend": "simulated"},
            "batch": {"groups": GROUPS, "episodes": EPISODES},
            "rollout": {"inter_query": (lag + 1) * GROUPS, "episode_timeout_s": 36000, "call_timeout_s": 36000},
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
            "mode": mode["mode"],
            "pipeline": {"lag": lag, **mode.get("pipeline", {})},
        }
    )


def play(mode: Mapping[str, Any], steps: int, seed: int, lag: int) -> Played:
    """Plays one mode."""
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder(simulate(settings_of(mode, out, steps=steps, seed=seed, lag=lag)))
        events = list(read_run(folder.journal))
        facts = read_facts(events)
        metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    end = facts.steps[-1].ended
    admitted = {event["group"]: event["t"] for event in events if event["event"] == "group_admitted"}
    tokens = {group: task_tokens(group, seed) for group in admitted}
    trained = [group for step in facts.steps for group in step.trained]
    early, early_end = facts.steps[:EARLY], facts.steps[EARLY - 1].ended
    return Played(
        tokens_per_s=sum(tokens[group] for group in trained) / end,
        step_s=end / steps,
        mean_staleness=fmean(line.get("staleness/solver/mean", 0.0) for line in metrics),
        max_staleness=max(line.get("staleness/solver/max", 0.0) for line in metrics),
        dropped=sum(event["event"] == "group_expired" and event["t"] < end for event in events),
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


def main() -> None:
    """Plays all modes, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60, help="steps of each mode (default 60)")
    options.add_argument("--seed", type=int, default=1, help="of the workload (default 1)")
    options.add_argument("--lag", type=int, default=1, help="pipeline.lag of the asynchronous modes (default 1)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as processes:
        played = processes.map(partial(play, steps=chosen.steps, seed=chosen.seed, lag=chosen.lag), MODES.values())
        found = dict(zip(MODES, played, strict=True))
    ours = found["windowed FIFO"]
    others = {name: one for name, one in found.items() if name not in ("windowed FIFO", "late dropped")}
    report(
        f"{chosen.steps} steps of {GROUPS} tasks, {EPISODES} episodes each, lag {chosen.lag}",
        ["", "tokens/s", "step, s", "staleness", "max", "dropped", "length ratio", "KS", "first steps", "KS"],
        [row(name, one) for name, one in found.items()],
        {
            **{f"throughput_vs_{name}": ours.tokens_per_s / one.tokens_per_s for name, one in others.items()},
            "length_ratio": ours.bias.ratio,
            "early_ratio": ours.early.ratio,
            "early_ratio_greedy": found["greedy"].early.ratio,
            "length_ratio_dropped": found["late dropped"].bias.ratio,
            "max_staleness": ours.max_staleness,
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def row(name: str, played: Played) -> list[str]:
    """One mode."""
    return [
        name,
        f"{played.tokens_per_s:.0f}",
        f"{played.step_s:.1f}",
        f"{played.mean_staleness:.2f}",
        f"{played.max_staleness:.0f}",
        f"{played.dropped}",
        f"{played.bias.ratio:.3f}",
        f"{played.bias.ks:.3f}",
        f"{played.early.ratio:.3f}",
        f"{played.early.ks:.3f}",
    ]


if __name__ == "__main__":
    main()
