"""Cost models of the simulated world, as data: the seconds that modelled devices take for each kind of work.

A decode step of a batch of b requests that hold k tokens of keys and values takes

    decode_s + decode_request_s b + decode_kv_s k

Every cost table names its origin: where it was measured, or what it was fitted to. `PROFILES` has tables by name:

    simulation.costs: {default: paper_14b}
    simulation.costs: {solver: {profile: paper_14b, engine: {slots: 8}}}      changes to a profile
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from flexmarl.settings import Settings


class EngineCosts(Settings):
    """One inference instance of a policy."""

    slots: int = Field(default=64, ge=1, description="Requests that decode together; more wait.")
    decode_s: float = Field(default=0.005, ge=0, description="Seconds of a decode step with an empty batch.")
    decode_request_s: float = Field(default=0.0002, ge=0, description="Seconds that each request adds to a step.")
    decode_kv_s: float = Field(default=0.0, ge=0, description="Seconds that each cached token adds to a step.")
    prefill_token_s: float = Field(default=0.0, ge=0, description="Seconds to prefill a prompt token; decoding waits.")
    kept_prefixes: int = Field(
        default=64, ge=0, description="Conversations whose prefix stays cached, if prompt tokens take time."
    )
    prefill_steps: float = Field(default=0.0, ge=0, description="Decode steps that the prefill of a request takes.")
    call_s: float = Field(default=0.0, ge=0, description="Seconds of a request's way to the engine and back.")
    load_s: float = Field(default=0.0, ge=0, description="Seconds to load newly published weights.")
    move_s: float = Field(default=2.5, ge=0, description="Seconds to load another policy's weights after a move.")
    start_s: float = Field(default=30.0, ge=0, description="Seconds to start a new instance.")
    sleep_s: float = Field(default=0.0, ge=0, description="Seconds to release device memory (mode colocated).")
    wake_s: float = Field(default=0.0, ge=0, description="Seconds to take device memory again.")
    devices: int = Field(default=1, ge=1, description="Devices of an instance, counted in utilisation.")
    busy_share: float = Field(
        default=1.0, gt=0, le=1, description="Share of an instance's busy time in which its devices count as active."
    )


class TrainerCosts(Settings):
    """The trainer of a policy."""

    micro_batch_s: float = Field(default=0.0, ge=0, description="Seconds per micro-batch, whatever its size.")
    sample_s: float = Field(default=0.05, ge=0, description="Further seconds per sample.")
    token_s: float = Field(default=0.0, ge=0, description="Further seconds per token of prompt and response.")
    update_s: float = Field(default=1.0, ge=0, description="Seconds of an optimiser update.")
    publish_s: float = Field(default=1.0, ge=0, description="Seconds to set new weights in the object store.")
    resume_s: float = Field(default=4.0, ge=0, description="Seconds to bring training state onto devices.")
    suspend_s: float = Field(default=2.0, ge=0, description="Seconds to move training state off devices.")
    devices: int = Field(default=1, ge=1, description="Devices of the process group, counted in utilisation.")


class CostSettings(Settings):
    """Costs of a policy's devices, and the origin of these numbers."""

    origin: str = Field(
        default="defaults, not measured", description="Where the numbers come from; printed with results."
    )
    weights_gib: float = Field(
        default=0.0, ge=0, description="GiB of a published version; `simulation.transfers` gives the time to move it."
    )
    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()


class TransferCosts(Settings):
    """Time to move published weights into the object store, and out again for each instance that loads them."""

    latency_s: float = Field(default=0.0, ge=0, description="Seconds per transfer, whatever its size.")
    gib_per_s: float | None = Field(default=None, gt=0, description="GiB per second of a transfer; null: no limit.")

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second; infinite if bytes take no time."""
        return math.inf if self.gib_per_s is None else self.gib_per_s * 2**30


class SharedHost(Settings):
    """Slowdown of engines and trainers that share cores, as on a laptop. All 0: each has devices of its own."""

    engine_per_trainer: float = Field(default=0.0, ge=0, description="Share by which a busy trainer slows an engine.")
    engine_per_engine: float = Field(
        default=0.0, ge=0, description="Share by which another busy engine slows an engine."
    )
    trainer_per_engine: float = Field(default=0.0, ge=0, description="Share by which a busy engine slows a trainer.")
    trainer_per_trainer: float = Field(default=0.0, ge=0, description="Share by which another busy trainer slows one.")


Costs = Mapping[str, CostSettings]
"""Costs by policy. `default` applies to every policy without an entry."""


def costs_of(costs: Costs, policy: str) -> CostSettings:
    """Returns the costs of a policy.

    >>> costs_of({"default": CostSettings(origin="guess")}, "solver").origin
    'guess'
    """
    return costs.get(policy) or costs.get("default") or CostSettings()


_PAPER = (
    "fitted to the step times of the FlexMARL paper's tables 2 and 3 on a synthetic workload, {size}, data set MA; not "
    "measured, and no property of the paper's devices"
)

PROFILES: Mapping[str, CostSettings] = {
    "paper_14b": CostSettings(
        origin=_PAPER.format(size="14B"),
        engine=EngineCosts(
            slots=5, decode_s=0.010, decode_request_s=0.002, prefill_steps=15, move_s=2.5, devices=4, busy_share=0.72
        ),
        trainer=TrainerCosts(sample_s=5.0 / 16, update_s=1.0, publish_s=1.0, resume_s=3.7, suspend_s=1.8, devices=16),
    ),
    # 32B: decoding, update and publication take 1.3 times, training 2.2 times as long as 14B.
    "paper_32b": CostSettings(
        origin=_PAPER.format(size="32B"),
        engine=EngineCosts(
            slots=5, decode_s=0.013, decode_request_s=0.0026, prefill_steps=15, move_s=2.5, devices=8, busy_share=0.72
        ),
        trainer=TrainerCosts(
            sample_s=2.2 * 5.0 / 16, update_s=1.3, publish_s=1.3, resume_s=7.2, suspend_s=3.8, devices=16
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
    """Fills in the profile that cost settings name. The origin then lists the keys that they changed.

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
