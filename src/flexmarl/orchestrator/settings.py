"""How big a step is, what may overlap in it, and when to evaluate and save."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Mode(StrEnum):
    """What may happen at the same time (docs/math.md, section 9). Both keep synchronous semantics."""

    SYNC = "sync"
    """Training starts when the whole step's rollout has ended."""
    MICROBATCH = "microbatch"
    """Complete groups train while others still play; one update at the end (FlexMARL section 4.3)."""


class BatchSettings(BaseModel):
    """The global batch of a step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: int = Field(default=64, ge=1, description="Tasks per step.")
    episodes: int = Field(default=8, ge=1, description="Episodes per group; group-relative credit needs at least 2.")


class EvaluateSettings(BaseModel):
    """Evaluation on held-out tasks, against pinned versions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = Field(
        default=256, ge=0, description="Held-out tasks before and after training; 0 turns evaluation off."
    )
    every: int = Field(default=0, ge=0, description="Also every so many steps; 0 is never.")
    every_tasks: int = Field(default=64, ge=1, description="Held-out tasks of these evaluations in between.")
    episodes: int = Field(default=1, ge=1, description="Episodes per held-out task.")
    temperature: float = Field(
        default=1.0, ge=0, description="Replaces every agent's sampling temperature; 0 is greedy."
    )


class CheckpointSettings(BaseModel):
    """Checkpoints at step boundaries."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=10, ge=0, description="Save every so many steps, and after the last one; 0 is never.")
    keep: int = Field(default=2, ge=1, description="How many of the newest checkpoints stay.")
    budget_gb: float | None = Field(
        default=None,
        gt=0,
        description="Fewer stay if they would take more than this; the newest always stays. null: no bound.",
    )

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return None if self.budget_gb is None else int(self.budget_gb * 1e9)
