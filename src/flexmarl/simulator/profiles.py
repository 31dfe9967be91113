"""Cost models by name, each with its origin.

simulation.costs: {default: paper_14b}
simulation.costs: {solver: {profile: paper_14b, engine: {slots: 8}}}      on top of a profile
"""

from collections.abc import Mapping
from typing import Any

from flexmarl.simulator.costs import CostSettings, EngineCosts, TrainerCosts

_PAPER = (
    "fitted to the step times of the FlexMARL paper's tables 2 and 3 on a synthetic workload, {size}, data set MA; not "
    "measured, and no property of the paper's devices"
)

PROFILES: Mapping[str, CostSettings] = {
    "paper_14b": CostSettings(
        origin=_PAPER.format(size="14B"),
        engine=EngineCosts(
            slots=5,
            decode_s=0.010,
            decode_request_s=0.002,
            prefill_steps=15,
            move_s=2.5,
            devices=4,
            busy_share=0.72,
        ),
        trainer=TrainerCosts(
            sample_s=5.0 / 16,
            update_s=1.0,
            publish_s=1.0,
            resume_s=3.7,
            suspend_s=1.8,
            devices=16,
        ),
    ),
    # 32B: decoding, update and publication take 1.3 times, training 2.2 times as long as 14B.
    "paper_32b": CostSettings(
        origin=_PAPER.format(size="32B"),
        engine=EngineCosts(
            slots=5,
            decode_s=0.013,
            decode_request_s=0.0026,
            prefill_steps=15,
            move_s=2.5,
            devices=8,
            busy_share=0.72,
        ),
        trainer=TrainerCosts(
            sample_s=2.2 * 5.0 / 16,
            update_s=1.3,
            publish_s=1.3,
            resume_s=7.2,
            suspend_s=3.8,
            devices=16,
        ),
    ),
    "tiny_cpu": CostSettings(
        origin="measured with benchmarks/device_costs.py: seed model of examples/math_team (0.8M parameters), one "
        "thread of a 2-core AMD EPYC virtual machine, CPU time, quickest of 2; what a process adds to a call, and "
        "its start, are not measured",
        engine=EngineCosts(
            slots=128,
            decode_s=1.74e-3,
            decode_request_s=3.68e-5,
            decode_kv_s=2.74e-7,
            prefill_token_s=2.2e-5,
            load_s=3.7e-3,
            move_s=3.7e-3,
        ),
        trainer=TrainerCosts(
            micro_batch_s=7.5e-3,
            sample_s=0.0,
            token_s=5.0e-5,
            update_s=1.6e-3,
            publish_s=3.1e-3,
            resume_s=6.9e-3,
            suspend_s=8.9e-3,
        ),
    ),
}


def with_profile(costs: Any) -> Any:
    """Settings of costs with the profile that they name filled in; the origin says what was changed.

    >>> with_profile({"profile": "paper_14b", "engine": {"slots": 8}})["origin"][-28:]
    '; here changed: engine.slots'
    """
    if isinstance(costs, str):
        return _profile(costs)
    if not isinstance(costs, Mapping) or "profile" not in costs:
        return costs
    profile = _profile(costs["profile"]).model_dump()
    own = {
        part: {**profile.get(part, {}), **value} if isinstance(value, Mapping) else value
        for part, value in costs.items()
        if part != "profile"
    }
    changed = [f"{part}.{key}" for part, value in costs.items() if isinstance(value, Mapping) for key in value]
    origin = "; here changed: ".join([profile["origin"], *([", ".join(changed)] if changed else [])])
    return {**profile, "origin": origin, **own}


def _profile(name: Any) -> CostSettings:
    if name not in PROFILES:
        raise ValueError(f"there is no cost profile {name!r}; there are: {', '.join(PROFILES)}")
    return PROFILES[name]
