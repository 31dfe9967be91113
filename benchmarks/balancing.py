"""Rules that move instances, in real time: 32 timed engines of eight agents, two of which get 76% of the calls.

    python benchmarks/balancing.py --json

Engines are timed (`engine: {type: timed}`): they compute nothing, answer after their modelled time, and live in the
controller's process; a model of real size would need 32 devices. All else is real, on Ray: the pool, the loops, moves,
eight trainers in processes of their own, publications. The workload is `crowded` of balance_rules.py, 192 trajectories
at a time, with lengths a tenth and all times 1/22: as fast as two cores carry, 150 calls a second. Four systems play
the same steps, in turns:

    static       no instance moves
    queue_gap    the paper's rule in its fitted form, each step beginning as configured
    same start   the same rule, each step beginning with instances in proportion to the work
    ours         drain_time, with that start

A ratio is the geometric mean over paired steps of our rollout's time by theirs. The first step of a run, in which
nothing is known, counts too. Trainers work between rollouts, and their time does not count.

    vs_static               ours by static
    vs_queue_gap            ours by queue_gap; `_high` is the end of its 95% interval
    vs_queue_gap_same_start ours by queue_gap with the same start
    bound_vs_ours           the lower bound (analysis/bound.py: longest trajectory alone, or all decoding) by ours
    simulated_vs_measured   mean step of `flexmarl simulate` by that of the real run; the system farthest from 1
    calls_per_s             calls a second of our rollouts
"""

import argparse
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import balance_rules
from common import report
from rich.console import Console

from flexmarl.analysis.bound import bounds_of
from flexmarl.analysis.facts import read_facts
from flexmarl.analysis.intervals import Estimate, mean
from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.simulation import simulate
from flexmarl.config import RunSettings
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Moved

MODEL = Path(__file__).parents[1] / "examples" / "store_assistant" / "seed_model"
FASTER, SHORTER = 22, 10
GROUPS, EPISODES = 48, 4
SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "static": {"rule": "none"},
    "queue_gap": {"rule": "queue_gap"},
    "same start": {"rule": "queue_gap", "start": "by_share"},
    "ours": {"rule": "drain_time", "start": "by_share"},
}
WANTED = {"simulated_vs_measured": 0.9}
WANTED_AT_MOST = {
    "vs_static": 0.70,
    "vs_queue_gap": 0.93,
    "vs_queue_gap_high": 1.0,
    "vs_queue_gap_same_start": 1.0,
    "simulated_vs_measured": 1.1,
    "calls_per_s": 150.0,
}


@dataclass(frozen=True)
class Played:
    """The steps of one run, measured or simulated."""

    spans: Sequence[float]
    """Seconds of each step's rollout."""
    bounds: Sequence[float]
    """Lower bounds of the same."""
    calls: Sequence[int]
    moves: int


def settings_of(system: str, seed: int, steps: int, out: str) -> RunSettings:
    """The run's config: that of balance_rules.py, shorter and faster."""
    slow = balance_rules.settings_of(balance_rules.Cell("crowded", seed, "none", "as_configured"), out)
    given = slow.model_dump(mode="json", exclude_unset=True)
    per_token = SHORTER / FASTER
    engine = {
        "slots": 5,
        "decode_s": 0.01 * per_token,
        "decode_request_s": 0.002 * per_token,
        "prefill_steps": 15 / SHORTER,
        "move_s": 2.5 / FASTER,
    }
    params: dict[str, Any] = given["tasks"]["params"]
    given["tasks"]["params"] = params | {
        "len_mean": 300 / SHORTER,
        "len_floor": max(1, 16 // SHORTER),
        "len_cap": 8192 // SHORTER,
        "tool_mean_s": 0.5 / FASTER,
    }
    for seat in given["team"]["agents"].values():
        seat["sampling"]["max_tokens"] = 8192 // SHORTER
    policy = {"model": str(MODEL), "instances": 4, "engine": {"type": "timed"}, "training": {"micro_batch": 128}}
    return RunSettings.model_validate(
        given
        | {
            "steps": steps,
            "cluster": {"backend": "ray", "threads": 1},
            "batch": {"groups": GROUPS, "episodes": EPISODES},
            "rollout": {"inter_query": GROUPS, "intra_query": EPISODES},
            "balance": {**SYSTEMS[system], "poll_s": 1.0 / FASTER, "move_s": 2.5 / FASTER},
            "alarms": {"drift": None},
            "policies": dict.fromkeys(balance_rules.STORE, policy),
            "simulation": given["simulation"]
            | {"costs": {"default": {"origin": "chosen for this benchmark", "engine": engine}}},
        }
    )


def measured(settings: RunSettings) -> Played:
    """Plays a run for real."""
    run = assemble_run(settings)
    run.train(Console(quiet=True))
    return read(settings, RunFolder(run.folder))


def simulated(settings: RunSettings) -> Played:
    """Plays the same in virtual time."""
    return read(settings, RunFolder(simulate(settings)))


def read(settings: RunSettings, folder: RunFolder) -> Played:
    """Reads a run's journal."""
    events = list(read_run(folder.journal))
    facts = read_facts(events)
    bounds = bounds_of(
        facts,
        settings.simulation.costs,
        instances=sum(policy.instances for policy in settings.policies.values()),
        trainers_at_once=None,
        trained=settings.trained,
        ahead=False,
    )
    calls = Counter(facts.step_of[call.group] for call in facts.calls)
    return Played(
        spans=[ended - began for began, ended in facts.rollouts],
        bounds=[max(bound.path_s, bound.decode_s) for bound in bounds],
        calls=[calls[step] for step in sorted(calls)],
        moves=sum(isinstance(event, Moved) for event in events),
    )


def ratio(ours: Sequence[Played], theirs: Sequence[Played]) -> Estimate:
    """Geometric mean of our times by theirs over paired steps, with its interval."""
    pairs = [pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one.spans, other.spans, strict=True)]
    logs = mean([math.log(a / b) for a, b in pairs], "paired steps")
    low, high = (math.nan if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Estimate(math.exp(logs.value), low, high, logs.how)


def spans(played: Sequence[Played]) -> list[float]:
    """The times of all steps."""
    return [span for one in played for span in one.spans]


def main() -> None:
    """Plays all, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=2, help="runs of each system, each with a seed (default 2)")
    options.add_argument("--steps", type=int, default=12, help="steps of a run (default 12)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    real: dict[str, list[Played]] = {system: [] for system in SYSTEMS}
    virtual: dict[str, list[Played]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as out:
        for seed in range(1, chosen.rounds + 1):
            for system in SYSTEMS:
                settings = settings_of(system, seed, chosen.steps, out)
                real[system].append(measured(settings))
                virtual[system].append(simulated(settings))
    against = {system: ratio(real["ours"], real[system]) for system in SYSTEMS}
    predicted = {
        system: statistics.fmean(spans(virtual[system])) / statistics.fmean(spans(real[system])) for system in SYSTEMS
    }
    ours = real["ours"]
    bound = statistics.fmean(bound for one in ours for bound in one.bounds)
    report(
        f"Rollouts of {chosen.rounds} runs of {chosen.steps} steps, {GROUPS * EPISODES} trajectories each",
        ["", "s (mean)", "simulated", "bound", "moves of a run", "ours by it", "95% interval"],
        [row(system, real[system], virtual[system], against[system]) for system in SYSTEMS],
        {
            "vs_static": against["static"].value,
            "vs_queue_gap": against["queue_gap"].value,
            "vs_queue_gap_high": against["queue_gap"].high or math.nan,
            "vs_queue_gap_same_start": against["same start"].value,
            "bound_vs_ours": bound / statistics.fmean(spans(ours)),
            "simulated_vs_measured": max(predicted.values(), key=lambda found: abs(math.log(found))),
            "calls_per_s": sum(number for one in ours for number in one.calls) / sum(spans(ours)),
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def row(system: str, real: Sequence[Played], virtual: Sequence[Played], ours_by_it: Estimate) -> list[str]:
    """One system in the table."""
    low, high = ours_by_it.low, ours_by_it.high
    return [
        system,
        *(f"{statistics.fmean(spans(played)):.2f}" for played in (real, virtual)),
        f"{statistics.fmean(bound for one in real for bound in one.bounds):.2f}",
        f"{statistics.fmean(one.moves for one in real):.0f}",
        f"{ours_by_it.value:.3f}",
        f"{low:.3f} to {high:.3f}" if system != "ours" else "",
    ]


if __name__ == "__main__":
    main()
