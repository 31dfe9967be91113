"""What every off-policy correction is: settings with a formula, free of torch until it is called.

Decides no correction: the loss's own clipping, against what was recorded, is all.

What every correction by importance weights shares: the veto, what is measured, and the batch's mean weight.

Decides truncated importance sampling: a token weighs as much likelier as it has become, up to a bound.

Decides the correction of IcePop (2025): tokens whose probability has changed too much do not count at all.

Decides masked or truncated importance sampling on tokens, whole rows, or the geometric mean of a row.

Off-policy corrections. In: who sampled a token, and how likely it is now. Out: what it is compared with and weighs.

A settings class is the correction. To add one, write its file and add its class to `CorrectionSettings`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexmarl.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.batching import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """N sampled tokens, as they were and as they are. Tensors are [N] and carry no gradient."""

    current: Tensor
    """Log-probability under the weights that are trained; a step has one update, so these are its old ones."""
    recorded: Tensor
    """Under the model of the version that sampled, as its engine recorded it: temperature 1, no filters."""
    drawn_from: Tensor
    """Under the distribution that was drawn from, temperature and filters applied."""
    fresh: Tensor
    """[N] bool: sampled at the version that is trained."""
    rows: Rows
    """Which tokens are one row's."""

    @property
    def log_ratio(self) -> Tensor:
        """x = old - mu, of docs/math.md section 10."""
        return self.current - self.drawn_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """What N tokens weigh, and why. All are [N]."""

    weights: Tensor
    """Factors of the token losses, after the loss's own clipping."""
    clipped: Tensor
    """Bool: the weight is at a bound."""
    masked: Tensor
    """Bool: the weight is 0, because the ratio left the bounds."""


class Correction(Settings, ABC):
    """What a token's loss is compared with, and what it is multiplied by. Divisors keep the original counts."""

    measures: ClassVar[tuple[str, ...]] = ()
    """Names of what `measured` gives: means over weighted tokens, in the metrics of each update."""

    @abstractmethod
    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """[N] the log-probabilities that the loss compares the current ones with."""

    @abstractmethod
    def weights(self, tokens: Sampled) -> Tensor:
        """[N] factors of the token losses, after clipping."""

    def measured(self, tokens: Sampled) -> tuple[Tensor, ...]:
        """[N] each, in the order of `measures`."""
        return ()

    @property
    def normalises(self) -> bool:
        """Whether the step also divides by the mean weight of the batch."""
        return False


class NoCorrection(Correction):
    """Tokens of the current version have ratio 1 (docs/math.md section 4), older ones that to their engine's record."""

    type: Literal["none"] = "none"

    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """The current ones where the token is fresh, exact; the recorded ones elsewhere."""
        return tokens.current.where(tokens.fresh, tokens.recorded)

    def weights(self, tokens: Sampled) -> Tensor:
        """1."""
        return tokens.current.new_ones(len(tokens.current))


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


class MultiLevelImportanceSampling(ImportanceWeights):
    """exp(x), x = old - mu of the token, summed over the row (`sequence`), or its mean over the row (`geometric`)."""

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="Whose ratio a token weighs: its own, its row's, or the row's geometric mean."
    )
    mode: Literal["truncate", "mask"] = Field(
        default="truncate", description="truncate: at most `high`; mask: 0 outside [1 / high, high]."
    )
    high: float = Field(default=2.0, ge=1, description="Bound on the ratio.")

    def weigh(self, tokens: Sampled) -> Weighed:
        """By the level's ratio."""
        ratio = importance(self._log_ratio(tokens))
        return truncated(ratio, 0, self.high) if self.mode == "truncate" else masked(ratio, 1 / self.high, self.high)

    def _log_ratio(self, tokens: Sampled) -> Tensor:
        match self.level:
            case "token":
                return tokens.log_ratio
            case "sequence":
                return tokens.rows.spread(tokens.rows.sum(tokens.log_ratio))
            case "geometric":
                return tokens.rows.spread(tokens.rows.mean(tokens.log_ratio))


CorrectionSettings = Annotated[
    NoCorrection | TruncatedImportanceSampling | IcePop | MultiLevelImportanceSampling, Field(discriminator="type")
]

__all__ = [
    "Correction",
    "CorrectionSettings",
    "IcePop",
    "MultiLevelImportanceSampling",
    "NoCorrection",
    "TruncatedImportanceSampling",
]
