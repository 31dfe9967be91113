"""Cost models of the simulated world, as data: what a device takes for what it does. Seconds and tokens.

A decode step of a batch of b requests that hold k tokens of keys and values takes

    decode_s + decode_request_s b + decode_kv_s k

and what a table says comes with its origin: measured where, or fitted to what.
"""

import math
from collections.abc import Mapping

from pydantic import Field

from flexmarl.settings import Settings


class EngineCosts(Settings):
    """One inference instance of a policy."""

    slots: int = Field(default=64, ge=1, description="Requests that decode together; more wait.")
    decode_s: float = Field(default=0.005, ge=0, description="Decode step of an empty batch.")
    decode_request_s: float = Field(default=0.0002, ge=0, description="More for each request in the batch.")
    decode_kv_s: float = Field(default=0.0, ge=0, description="More for each token of keys and values in the batch.")
    prefill_token_s: float = Field(default=0.0, ge=0, description="A prompt token, while decoding stands still.")
    kept_prefixes: int = Field(
        default=64, ge=0, description="Conversations whose prefix it keeps, where prompt tokens cost something."
    )
    prefill_steps: float = Field(default=0.0, ge=0, description="Decode steps that a request's prefill counts as.")
    call_s: float = Field(default=0.0, ge=0, description="On the way of each request, to the engine and back.")
    load_s: float = Field(default=0.0, ge=0, description="Loading newly published weights.")
    move_s: float = Field(default=2.5, ge=0, description="Loading another policy's weights, when it is moved.")
    start_s: float = Field(default=30.0, ge=0, description="Starting a new instance.")
    sleep_s: float = Field(default=0.0, ge=0, description="Giving its device memory back (mode colocated).")
    wake_s: float = Field(default=0.0, ge=0, description="Taking it again.")
    devices: int = Field(default=1, ge=1, description="Devices of an instance; they count in utilisation.")
    busy_share: float = Field(
        default=1.0, gt=0, le=1, description="Share of its time at work in which a device counts as active."
    )


class TrainerCosts(Settings):
    """The trainer of a policy."""

    micro_batch_s: float = Field(default=0.0, ge=0, description="Each micro-batch, whatever is in it.")
    sample_s: float = Field(default=0.05, ge=0, description="More for each sample.")
    token_s: float = Field(default=0.0, ge=0, description="More for each token, prompt and response.")
    update_s: float = Field(default=1.0, ge=0, description="Optimiser update.")
    publish_s: float = Field(default=1.0, ge=0, description="Setting the new weights in the object store.")
    resume_s: float = Field(default=4.0, ge=0, description="Bringing its state onto devices.")
    suspend_s: float = Field(default=2.0, ge=0, description="Setting its state aside.")
    devices: int = Field(default=1, ge=1, description="Devices of the process group; they count in utilisation.")


class CostSettings(Settings):
    """What a policy's devices take, and where that is from."""

    origin: str = Field(
        default="defaults, not measured", description="Where the numbers are from; printed with results."
    )
    weights_gib: float = Field(
        default=0.0, ge=0, description="What a published version takes up; moving it takes `simulation.transfers`."
    )
    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()


class TransferCosts(Settings):
    """Published weights on their way into the object store and out of it, once for each instance that loads them."""

    latency_s: float = Field(default=0.0, ge=0, description="Each transfer, whatever is in it.")
    gib_per_s: float | None = Field(default=None, gt=0, description="Speed of a transfer; null: bytes take no time.")

    @property
    def bytes_per_s(self) -> float:
        """Infinite where bytes take no time."""
        return math.inf if self.gib_per_s is None else self.gib_per_s * 2**30


class SharedHost(Settings):
    """Engines and trainers that compete for the same cores, as on a laptop; all 0 on devices of their own."""

    engine_per_trainer: float = Field(default=0.0, ge=0, description="How much slower engines are per busy trainer.")
    engine_per_engine: float = Field(
        default=0.0, ge=0, description="How much slower engines are per other busy engine."
    )
    trainer_per_engine: float = Field(default=0.0, ge=0, description="How much slower trainers are per busy engine.")
    trainer_per_trainer: float = Field(default=0.0, ge=0, description="How much slower per other busy trainer.")


Costs = Mapping[str, CostSettings]
"""By policy; `default` is for every policy without an entry of its own."""


def costs_of(costs: Costs, policy: str) -> CostSettings:
    """Those of a policy.

    >>> costs_of({"default": CostSettings(origin="guess")}, "solver").origin
    'guess'
    """
    return costs.get(policy) or costs.get("default") or CostSettings()
