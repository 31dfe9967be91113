"""The systems of allocation.py for real: a policy's training state moves between processes, beside what is simulated.

    python benchmarks/allocation_real.py --json

Six policies with tiny models of their own, which train in processes on Ray; their engines are timed, so that the cores
belong to the trainers. The systems are those of allocation.py, with shorter replies: static has six processes for
training, the others have two, on which policies take turns. Costs are fitted to a run of `fewer` with a seed of its
own; then each system is simulated with them and played for real, in turns. The first step of every run is left out.

    real_by_simulated_*     mean step time, real by simulated, of each system
    real_fewer_by_static    mean step time of fewer by static, both real: on two cores six processes gain nothing
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import allocation
from common import parser, report
from prediction import measured_run, warm_steps

from flexmarl.assemble.simulation import simulate
from flexmarl.cli.simulations import as_settings, fitted
from flexmarl.config import RunSettings
from flexmarl.events.run_folder import RunFolder

MODEL = Path(__file__).parents[1] / "examples" / "math_team" / "seed_model"
GROUPS, EPISODES = 8, 8
REPLY, LONGEST = 80, 640
"""Tokens: mean and most."""
SLEEP = {"sleep_s": 0.2, "wake_s": 0.2}
"""Seconds of a timed engine: no run of `fewer` has them."""
ENGINE = {"slots": 8, "decode_s": 3e-3, "decode_request_s": 4e-4, **SLEEP}
FITTED_SEED = 100
FIGURES = {
    "static": "real_by_simulated_static",
    "fewer": "real_by_simulated_fewer",
    "ours": "real_by_simulated_ours",
    "colocated": "real_by_simulated_colocated",
}
WANTED = dict.fromkeys(FIGURES.values(), 0.85)
WANTED_AT_MOST = dict.fromkeys(WANTED, 1.15)


def settings_of(system: str, seed: int, steps: int, out: str, simulation: Mapping[str, Any] = {}) -> RunSettings:
    """The run's config; `simulation` replaces what engines and trainers are given there."""
    given = allocation.settings_of(system, seed, steps, out).model_dump(mode="json", exclude_unset=True)
    given["tasks"]["params"] |= {"len_mean": REPLY, "len_floor": 8, "len_cap": LONGEST, "tool_mean_s": 0.0}
    for seat in given["team"]["agents"].values():
        seat["sampling"]["max_tokens"] = LONGEST
    training = {"micro_batch": 16, "skip_zero_advantage": False}
    policies = {
        name: {"model": str(MODEL), "instances": number, "engine": {"type": "timed"}, "training": training}
        for name, number in allocation.instances_of(system).items()
    }
    costs = {"default": {"origin": "chosen for this benchmark", "engine": ENGINE}}
    return RunSettings.model_validate(
        given
        | {
            "cluster": {"backend": "ray", "threads": 1},
            "batch": {"groups": GROUPS, "episodes": EPISODES},
            "rollout": {"inter_query": allocation.AT_ONCE, "intra_query": EPISODES},
            "alarms": {"drift": None},
            "policies": policies,
            "simulation": {"replies": {"default": {"type": "asked"}}, "costs": costs, **simulation},
        }
    )


def main() -> None:
    """Fits, simulates, plays, prints the table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=6, help="steps of each run, the first of which is left out")
    options.set_defaults(repeats=2)
    chosen = options.parse_args()
    real: dict[str, list[float]] = {system: [] for system in allocation.SYSTEMS}
    virtual: dict[str, list[float]] = {system: [] for system in allocation.SYSTEMS}
    with tempfile.TemporaryDirectory() as out:
        first = settings_of("fewer", FITTED_SEED, chosen.steps, out)
        folder = measured_run(first)
        fit = {
            key: of for key, of in as_settings(fitted(first, folder, given=first), folder).items() if key != "recorded"
        }
        for of_policy in fit["costs"].values():
            of_policy["engine"] |= SLEEP
        for seed in range(1, chosen.repeats + 1):
            for system in allocation.SYSTEMS:
                real[system] += warm_steps(measured_run(settings_of(system, seed, chosen.steps, out)))
                simulated = settings_of(system, seed, chosen.steps, out, fit)
                virtual[system] += warm_steps(RunFolder(simulate(simulated)))
    by_simulated = {system: fmean(real[system]) / fmean(virtual[system]) for system in real}
    report(
        f"Step time, {chosen.repeats} runs of {chosen.steps} steps, {GROUPS * EPISODES} trajectories a step",
        ["", "real, s", "simulated, s", "real by simulated", "real by static's"],
        [
            [
                system,
                f"{fmean(real[system]):.2f}",
                f"{fmean(virtual[system]):.2f}",
                f"{by_simulated[system]:.3f}",
                f"{fmean(real[system]) / fmean(real['static']):.3f}",
            ]
            for system in real
        ],
        {FIGURES[system]: ratio for system, ratio in by_simulated.items()}
        | {"real_fewer_by_static": fmean(real["fewer"]) / fmean(real["static"])},
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
