"""Decides the learning rate of an update."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from flexmarl.settings import Settings


class ScheduleSettings(Settings):
    """Warm-up from 0 to the full learning rate; then constant, or linear or cosine decay to `min_ratio` times it."""

    type: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Updates before the full learning rate is reached.")
    decay_steps: int | None = Field(
        default=None, gt=0, description="Updates, warm-up included, after which the rate stays at its minimum."
    )
    min_ratio: float = Field(default=0.0, ge=0, le=1, description="Final rate as a share of the learning rate.")

    @model_validator(mode="after")
    def _decay_needs_its_length(self) -> Self:
        if self.type == "constant":
            if self.decay_steps is not None:
                raise ValueError(f"decay_steps is {self.decay_steps} but type is 'constant'; use 'linear' or 'cosine'")
        elif self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps is {self.decay_steps} with type '{self.type}' and warmup_steps {self.warmup_steps}; set "
                "it to the number of updates of the run, more than warmup_steps"
            )
        return self

    def factor(self, update: int) -> float:
        """Share of the learning rate for update number `update`, counted from 0.

        >>> [ScheduleSettings(type="linear", warmup_steps=2, decay_steps=6).factor(i) for i in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        progress = min(1.0, (update - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        shape = 1.0 - progress if self.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * shape
