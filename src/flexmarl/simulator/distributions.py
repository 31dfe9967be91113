"""Decides how long something is, or takes: numbers drawn from a long-tailed, a short-tailed or no distribution."""

import math
import random
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flexmarl.settings import Settings


class Distribution(Settings):
    """Where numbers are drawn from; a plain number is always drawn.

    >>> Distribution.model_validate(3.5).draw(random.Random(0))
    3.5
    """

    shape: Literal["constant", "exponential", "lognormal"] = Field(
        default="constant", description="Lognormal has the longest tail; `sigma` says how long."
    )
    mean: float = Field(ge=0, description="Before floor and cap.")
    sigma: float = Field(
        default=1.0,
        ge=0,
        description="Lognormal: standard deviation of the logarithm; 1.0 draws ten means once in 400.",
    )
    floor: float = Field(default=0.0, ge=0, description="Less counts as this.")
    cap: float = Field(default=math.inf, description="More counts as this.")

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_constant(cls, value: Any) -> Any:
        return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _the_range_is_not_empty(self) -> Self:
        if self.cap < self.floor:
            raise ValueError(f"cap is {self.cap}, below floor, which is {self.floor}; use a cap of at least the floor")
        return self

    def draw(self, rng: random.Random) -> float:
        """The next number of this stream."""
        return min(max(self._draw(rng), self.floor), self.cap)

    def _draw(self, rng: random.Random) -> float:
        if self.mean == 0 or self.shape == "constant":
            return self.mean
        if self.shape == "exponential":
            return rng.expovariate(1 / self.mean)
        # exp(mu + sigma²/2) is the mean of a lognormal.
        return rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
