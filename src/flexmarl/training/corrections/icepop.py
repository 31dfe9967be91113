"""Decides the correction of IcePop (2025): tokens whose probability has changed too much do not count at all."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flexmarl.training.corrections.base import Sampled, Weighed
from flexmarl.training.corrections.importance import ImportanceWeights, importance, masked


class IcePop(ImportanceWeights):
    """exp(old - mu) where it lies in [low, high], else 0."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0, description="Ratios below weigh 0.")
    high: float = Field(default=2.0, gt=0, description="Ratios above weigh 0.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, which is {self.high}; use low: 0.5 and high: 2")
        return self

    def weigh(self, tokens: Sampled) -> Weighed:
        """Masked on both sides."""
        return masked(importance(tokens.log_ratio), self.low, self.high)
