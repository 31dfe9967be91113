"""What a user may choose about the store."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings

MEMORY_BUDGET_GB = 2.0
"""Of rows that ended, memory keeps this much unless the user says otherwise: without a bound, a long run fills it."""


class StoreSettings(Settings):
    """Where experience is kept."""

    type: Literal["sqlite", "memory"] = Field(
        default="sqlite",
        description="`sqlite`: the file `experience.sqlite` in the run folder, which survives any crash; "
        "`memory`: gone when the run ends.",
    )
    budget_gb: float | None = Field(
        default=None,
        gt=0,
        description="When the store is larger after a checkpoint, the oldest rows lose their tokens and texts, and "
        "keep their numbers and states. null: no bound for `sqlite`, 2 for `memory`.",
    )

    @property
    def budget_bytes(self) -> int | None:
        """The bound that `prune` takes; None where there is none."""
        budget_gb = MEMORY_BUDGET_GB if self.budget_gb is None and self.type == "memory" else self.budget_gb
        return None if budget_gb is None else int(budget_gb * 1e9)
