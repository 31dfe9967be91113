"""Settings of the engines and of the pool in front of them, one class per engine `type`."""

import pkgutil
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

ENGINES: Mapping[str, str] = {
    "embedded": "flexmarl.inference.settings:EmbeddedSettings",
}
"""Where the settings class of each engine `type` is; a new engine adds one line here (docs: write an engine)."""


def engine_settings_types() -> tuple[type[BaseModel], ...]:
    """The settings classes of ENGINES, for a union chosen by `type`."""
    return tuple(pkgutil.resolve_name(path) for path in ENGINES.values())


class EmbeddedSettings(BaseModel):
    """Our own continuous batching over a Hugging Face causal LM: the choice on a CPU and for tiny models."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    factory: ClassVar[str] = "flexmarl.inference.backends.embedded.engine:make_engine"

    type: Literal["embedded"] = "embedded"
    slots: int = Field(default=64, ge=1, description="Requests that decode together; more wait in the queue.")
    max_len: int = Field(
        default=2048, ge=2, description="Tokens per slot, prompt and response; memory is touched on use."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights, keys and values; published weights must have the same."
    )
    prefill_tokens: int = Field(
        default=4096, ge=1, description="Prompt tokens computed in one step; a longer prompt has a step of its own."
    )
    prefix_reuse: bool = Field(
        default=True,
        description="Keep a finished call's keys and values for its conversation; never done in deterministic runs.",
    )
    kept_prefixes: int = Field(
        default=64, ge=0, description="Conversations whose prefix is kept, longest unused out first."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of a decode step, e.g. 1 for a tiny model; null: those of the process.",
    )
    steps_per_turn: int = Field(
        default=4,
        ge=1,
        description="Decode steps per turn on the device thread, which a trainer may share.",
    )

    def num_kept(self, *, deterministic: bool) -> int:
        """Cache rows behind the slots. None if deterministic: a prefix computed in other company has other bits."""
        return self.kept_prefixes if self.prefix_reuse and not deterministic else 0


class PoolSettings(BaseModel):
    """Patience of the pool with its instances."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_timeout_s: float = Field(default=120.0, gt=0, description="An instance that loads for longer is given up.")
    abort_grace_s: float = Field(default=5.0, gt=0, description="How long an aborted request may take to come back.")
    replacements: int = Field(
        default=3, ge=0, description="Instances that a run may start in place of lost ones, per policy; 0: none."
    )
    start_timeout_s: float = Field(default=300.0, gt=0, description="A replacement that starts for longer is given up.")
    close_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a lost instance may take to close before its replacement starts."
    )
