"""What every correction by importance weights shares: the veto, what is measured, and the batch's mean weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from flexmarl.training.corrections.base import Correction, Sampled, Weighed

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceWeights(Correction):
    """Tokens weigh as much as they have become likelier, within bounds; the loss compares with the trained weights.

    So the loss's own clipping does not act: this is PPO with its proximal policy decoupled from the one that sampled.
    """

    measures: ClassVar[tuple[str, ...]] = (
        "correction_weight",
        "correction_weight_squared",
        "correction_clipped",
        "correction_masked",
        "correction_vetoed",
    )

    veto: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="A row weighs 0 if one of its tokens has become less likely than this share of what it was "
        "(1e-4, say); null is off.",
    )
    batch_normalise: bool = Field(
        default=False, description="Divide the update by the mean weight of the batch's tokens, so that it averages 1."
    )

    @abstractmethod
    def weigh(self, tokens: Sampled) -> Weighed:
        """The weights within their bounds, before the veto."""

    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """The current ones."""
        return tokens.current

    def weights(self, tokens: Sampled) -> Tensor:
        """The bounded weights; 0 in rows with a veto."""
        return self.weigh(tokens).weights.masked_fill(self._vetoed(tokens), 0)

    def measured(self, tokens: Sampled) -> tuple[Tensor, ...]:
        """The weight, its square (for the effective sample size), and what bounded it."""
        weighed, vetoed, weights = self.weigh(tokens), self._vetoed(tokens), self.weights(tokens)
        flags = (weighed.clipped & ~vetoed, weighed.masked & ~vetoed, vetoed)
        return weights, weights.square(), *(flag.to(weights.dtype) for flag in flags)

    @property
    def normalises(self) -> bool:
        """As set."""
        return self.batch_normalise

    def _vetoed(self, tokens: Sampled) -> Tensor:
        """[N] bool: a token of the same row has a veto."""
        if self.veto is None:
            return tokens.fresh.new_zeros(len(tokens.fresh))
        unlikely = (tokens.log_ratio < math.log(self.veto)).to(tokens.current.dtype)
        return tokens.rows.spread(tokens.rows.sum(unlikely)) > 0


def importance(log_ratio: Tensor) -> Tensor:
    """exp(x), with x clipped to 20 either way, so that it stays finite."""
    return log_ratio.clamp(-20, 20).exp()


def truncated(ratio: Tensor, low: float | None, high: float | None) -> Weighed:
    """The ratio, moved to the nearer bound where it is outside."""
    weights = ratio if low is None and high is None else ratio.clamp(low, high)
    clipped = weights != ratio
    return Weighed(weights=weights, clipped=clipped, masked=clipped.new_zeros(len(clipped)))


def masked(ratio: Tensor, low: float, high: float) -> Weighed:
    """The ratio, 0 where it is outside; the bounds themselves are inside."""
    outside = (ratio < low) | (ratio > high)
    return Weighed(weights=ratio.masked_fill(outside, 0), clipped=outside.new_zeros(len(outside)), masked=outside)
