"""Decides truncated importance sampling: a token weighs as much likelier as it has become, up to a bound."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flexmarl.training.corrections.base import Sampled, Weighed
from flexmarl.training.corrections.importance import ImportanceWeights, importance, truncated


class TruncatedImportanceSampling(ImportanceWeights):
    """clip(exp(old - mu), low, cap): old under the weights that are trained, mu under what was drawn from.

    Without a cap it is decoupled PPO: exact, with a variance that nothing bounds.
    """

    type: Literal["tis"] = "tis"
    low: float = Field(default=0.0, ge=0, description="Smallest weight.")
    cap: float | None = Field(
        default=2.0, gt=0, description="Largest weight: bounds the variance, at the price of a bias; null is none."
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.cap is not None and self.low > self.cap:
            raise ValueError(f"low is {self.low}, above cap, which is {self.cap}; use low: 0")
        return self

    def weigh(self, tokens: Sampled) -> Weighed:
        """Truncated on both sides."""
        return truncated(importance(tokens.log_ratio), self.low, self.cap)
