"""Decides the loss of a critic: how far its values are from the returns that credit found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from flexmarl.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class CriticSettings(Settings):
    """A value per sampled token, from a linear head on the policy's own trunk, trained with the policy."""

    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        description="Peak rate of the value head, which begins at 0 and has further to go than the policy; scheduled "
        "as the policy's. 1e-3 to 1e-2 for models of a few million.",
    )
    coef: float = Field(default=0.5, gt=0, description="Weight of the value loss beside the policy loss.")
    clip: float | None = Field(
        default=0.2, gt=0, description="How far a value may move from the one that credit saw; null is off."
    )

    def per_token(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """[N] max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2; only `values` carries gradient."""
        error = (values - returns).square()
        if self.clip is not None:
            bounded = values.clamp(old_values - self.clip, old_values + self.clip)
            error = error.maximum((bounded - returns).square())
        return error / 2
