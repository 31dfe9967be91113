"""Settings of the experience store."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings

MEMORY_BUDGET_GB = 2.0
"""Default size that a store in memory is pruned to: without a bound, a long run would fill the memory."""


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
        """The bound for `prune`, in bytes; None if there is no bound."""
        budget_gb = MEMORY_BUDGET_GB if self.budget_gb is None and self.type == "memory" else self.budget_gb
        return None if budget_gb is None else int(budget_gb * 1e9)
