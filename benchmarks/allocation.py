"""Six policies of unequal activity on a third of the training devices, in the simulated world: use and step time.

    python benchmarks/allocation.py --json

The production loops and rules play; devices are modelled, with the costs of profile `paper_14b`. All systems play the
same tasks with the same calls. One policy samples half of all turns, another one 4%.

    static      each policy has a training place for the whole run: six places
    fewer       the policies take turns on two places (process_groups.at_once), while others play; the devices of the
                other four places are not used
    ours        the same, and these devices serve further instances, in proportion to the turns of their policy
    colocated   two places on the devices of static's engines (mode colocated), which sleep while policies train

    utilisation_vs_static       share of the time of training places in which they train, ours by static
    step_time_vs_static         geometric mean over paired steps of ours by static
    fewer_step_time             the same of fewer by static
    colocated_utilisation       share of the time of all devices, engines' and trainers', that is used: colocated by
                                static
    colocated_step_time         geometric mean over paired steps of colocated by static
    colocated_devices           devices of colocated by those of static
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import report

from flexmarl.analysis.costs import costs_of
from flexmarl.analysis.facts import read_facts
from flexmarl.analysis.figures import Pools, report_of
from flexmarl.assemble.simulation import simulate
from flexmarl.config import RunSettings
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import PolicyName

SHARES = {"planner": 0.5, "coder": 0.2, "critic": 0.12, "tester": 0.08, "writer": 0.06, "judge": 0.04}
"""Share of the turns of each policy."""
PLACES = len(SHARES) // 3
INSTANCES = dict.fromkeys(SHARES, 2)
MORE_INSTANCES = {"planner": 10, "coder": 5, "critic": 4, "tester": 3, "writer": 3, "judge": 3}
"""On the devices of static, without those of four training places of 16 devices: an instance has four."""
GROUPS, EPISODES, AT_ONCE = 16, 8, 4
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "static": {},
    "fewer": {"process_groups": {"at_once": PLACES}},
    "ours": {"process_groups": {"at_once": PLACES}},
    "colocated": {"process_groups": {"at_once": PLACES}, "mode": "colocated"},
}
SLEEP_S = 2.0
"""Seconds in which an engine gives its memory up, or takes it again: about what its weights take to host memory."""
WANTED = {"utilisation_vs_static": 2.0}
WANTED_AT_MOST = {"step_time_vs_static": 1.0}


@dataclass(frozen=True)
class Played:
    """A simulated run."""

    step_s: Sequence[float]
    training: float
    """Utilisation of the training places."""
    overall: float
    """Utilisation of all devices."""
    devices: int
    swaps: int


def instances_of(system: str) -> Mapping[str, int]:
    """The instances of each policy."""
    return MORE_INSTANCES if system == "ours" else INSTANCES


def settings_of(system: str, seed: int, steps: int, out: str) -> RunSettings:
    """The run's config."""
    return RunSettings.model_validate(
        {
            "seed": seed,
            "steps": steps,
            "out": out,
            "code": [],
            "mode": "microbatch",
            "cluster": {"backend": "simulated"},
            "batch": {"groups": GROUPS, "episodes": EPISODES},
            "rollout": {"inter_query": AT_ONCE, "intra_query": EPISODES, "episode_timeout_s": 36000},
            "credit": {"filter": None},
            "evaluate": {"tasks": 0},
            "checkpoint": {"every": 0},
            "tasks": {
                "type": "generator",
                "name": "workload",
                "params": {"agents": SHARES, "turns_min": 3, "turns_extra": 2.0, "sigma_query": 0.4, "sigma_traj": 0.3},
            },
            "policies": {
                name: {"model": "none", "instances": number, "training": {"micro_batch": 16}}
                for name, number in instances_of(system).items()
            },
            "team": {
                "workflow": {"type": "custom", "name": "call_graph"},
                "agents": {name: {"policy": name, "sampling": {"max_tokens": 8192}} for name in SHARES},
            },
            "simulation": {
                "replies": {"default": {"type": "asked"}},
                "costs": {"default": {"profile": "paper_14b", "engine": {"sleep_s": SLEEP_S, "wake_s": SLEEP_S}}},
            },
            **SYSTEMS[system],
        }
    )


def played(system: str, seed: int, steps: int) -> Played:
    """Plays a system."""
    with tempfile.TemporaryDirectory() as out:
        settings = settings_of(system, seed, steps, out)
        facts = read_facts(read_run(RunFolder(simulate(settings)).journal))
    costs, at_once = settings.simulation.costs, settings.process_groups.at_once
    shared = settings.mode is Mode.COLOCATED
    found = report_of(facts, Pools(costs=costs, trainers_at_once=at_once, shared=shared))
    assert found is not None, "steps have ended"
    of = costs_of(costs, PolicyName("planner"))
    engines = sum(instances_of(system).values()) * of.engine.devices
    trainers = (at_once or len(SHARES)) * of.trainer.devices
    return Played(
        step_s=[step.ended - step.began for step in facts.steps],
        training=found.training_utilisation,
        overall=found.utilisation,
        devices=max(engines, trainers) if shared else engines + trainers,
        swaps=found.swaps,
    )


def ratio(ours: Sequence[Played], theirs: Sequence[Played]) -> float:
    """Geometric mean over paired steps of our time by theirs."""
    pairs = [
        pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one.step_s, other.step_s, strict=True)
    ]
    return statistics.geometric_mean(a / b for a, b in pairs)


def main() -> None:
    """Plays all, prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=4, help="runs of each system, each with a seed (default 4)")
    options.add_argument("--steps", type=int, default=6, help="steps of a run (default 6)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    cells = [(system, seed) for system in SYSTEMS for seed in range(1, chosen.seeds + 1)]
    with ProcessPoolExecutor(min(len(cells), os.cpu_count() or 1)) as pool:
        every = list(pool.map(partial(played, steps=chosen.steps), *zip(*cells, strict=True)))
    by = {name: [one for (system, _), one in zip(cells, every, strict=True) if system == name] for name in SYSTEMS}

    def mean(system: str, figure: str) -> float:
        return statistics.fmean(getattr(one, figure) for one in by[system])

    report(
        f"{chosen.seeds} runs of {chosen.steps} steps, {len(SHARES)} policies, {GROUPS * EPISODES} trajectories a step",
        ["", "devices", "s a step", "training used", "all used", "swaps of a run", "step by static"],
        [
            [
                system,
                f"{mean(system, 'devices'):.0f}",
                f"{statistics.fmean(s for one in by[system] for s in one.step_s):.1f}",
                *(f"{mean(system, figure):.3f}" for figure in ("training", "overall")),
                f"{mean(system, 'swaps'):.0f}",
                f"{ratio(by[system], by['static']):.3f}",
            ]
            for system in SYSTEMS
        ],
        {
            "utilisation_vs_static": mean("ours", "training") / mean("static", "training"),
            "step_time_vs_static": ratio(by["ours"], by["static"]),
            "fewer_step_time": ratio(by["fewer"], by["static"]),
            "colocated_utilisation": mean("colocated", "overall") / mean("static", "overall"),
            "colocated_step_time": ratio(by["colocated"], by["static"]),
            "colocated_devices": mean("colocated", "devices") / mean("static", "devices"),
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
