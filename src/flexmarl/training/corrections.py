"""Decides off-policy corrections: what a token's log-probability is compared with, and the weight of its loss.

In: the version that sampled each token, and its log-probabilities then and now. Out: log-probabilities to compare with,
and a weight per token.

`none`     no weights: the loss compares with what was recorded, and only its own clipping acts
`tis`      truncated importance sampling: the weight is how much likelier a token has become, up to a bound
`icepop`   IcePop (2025): tokens whose probability has changed too much have weight 0
`mis`      masked or truncated importance sampling by token, by row, or by the geometric mean of a row

A settings class is the correction, and this module does not import torch. To add a correction, write its class and add
it to `CorrectionSettings`.
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
    """N sampled tokens with their log-probabilities then and now. Tensors are [N] and carry no gradient."""

    current: Tensor
    """Log-probability under the trained weights. A step has one update, so these are also its old log-probabilities."""
    recorded: Tensor
    """Log-probability under the version that sampled, as its engine recorded it: temperature 1, no filters."""
    drawn_from: Tensor
    """Log-probability under the distribution that was sampled from, with temperature and filters."""
    fresh: Tensor
    """[N] bool: True if the trained version sampled the token's whole row."""
    rows: Rows
    """Maps tokens to their rows."""

    @property
    def log_ratio(self) -> Tensor:
        """x = old - mu of docs/math.md section 10."""
        return self.current - self.drawn_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Weights of N tokens, and the reasons for them. All are [N]."""

    weights: Tensor
    """Factors of the token losses, applied after the loss's own clipping."""
    clipped: Tensor
    """Bool: True where the weight is at a bound."""
    masked: Tensor
    """Bool: True where the weight is 0 because the ratio left the bounds."""


class Correction(Settings, ABC):
    """Base of all corrections: what a loss compares with, and its weight. Divisors keep the original counts."""

    weighs: ClassVar[bool] = True
    """True if it compares with the distribution that was sampled from, whose log-probabilities it needs."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Names of the measures that `measured` gives. Their means over weighted tokens are metrics of each update."""

    @abstractmethod
    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """[N] the log-probabilities that the loss compares the current ones with."""

    @abstractmethod
    def weights(self, tokens: Sampled) -> Tensor:
        """[N] factors of the token losses, applied after clipping."""

    def measured(self, tokens: Sampled) -> tuple[Tensor, ...]:
        """The measures, [N] each, in the order of `measures`."""
        return ()

    @property
    def normalises(self) -> bool:
        """True if the step also divides by the mean weight of the batch."""
        return False


class NoCorrection(Correction):
    """No weights. Tokens of the current version have ratio 1 (docs/math.md section 4).

    The loss compares older tokens with the log-probabilities that their engine recorded.
    """

    weighs: ClassVar[bool] = False

    type: Literal["none"] = "none"

    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """The current log-probability where the token is fresh, which is exact; the recorded one elsewhere."""
        return tokens.current.where(tokens.fresh, tokens.recorded)

    def weights(self, tokens: Sampled) -> Tensor:
        """All 1."""
        return tokens.current.new_ones(len(tokens.current))


class ImportanceWeights(Correction):
    """Base of corrections that weigh tokens by how much likelier they have become, within bounds.

    The loss compares with the trained weights, so its own clipping does not act: this is PPO whose proximal policy is
    decoupled from the one that sampled.
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
        """The current log-probabilities."""
        return tokens.current

    def weights(self, tokens: Sampled) -> Tensor:
        """The bounded weights, and 0 in rows with a veto."""
        return self.weigh(tokens).weights.masked_fill(self._vetoed(tokens), 0)

    def measured(self, tokens: Sampled) -> tuple[Tensor, ...]:
        """The weight, its square (for the effective sample size), and three flags, 0 or 1: clipped, masked, vetoed."""
        weighed, vetoed, weights = self.weigh(tokens), self._vetoed(tokens), self.weights(tokens)
        flags = (weighed.clipped & ~vetoed, weighed.masked & ~vetoed, vetoed)
        return weights, weights.square(), *(flag.to(weights.dtype) for flag in flags)

    @property
    def normalises(self) -> bool:
        """True if `batch_normalise` is set."""
        return self.batch_normalise

    def _vetoed(self, tokens: Sampled) -> Tensor:
        """[N] bool: True if a token of the same row is less likely than the veto allows."""
        if self.veto is None:
            return tokens.fresh.new_zeros(len(tokens.fresh))
        unlikely = (tokens.log_ratio < math.log(self.veto)).to(tokens.current.dtype)
        return tokens.rows.spread(tokens.rows.sum(unlikely)) > 0


def importance(log_ratio: Tensor) -> Tensor:
    """exp(x), with x clipped to [-20, 20] so that it stays finite."""
    return log_ratio.clamp(-20, 20).exp()


def truncated(ratio: Tensor, low: float | None, high: float | None) -> Weighed:
    """Weights: the ratio, moved to the nearer bound where it is outside."""
    weights = ratio if low is None and high is None else ratio.clamp(low, high)
    clipped = weights != ratio
    return Weighed(weights=weights, clipped=clipped, masked=clipped.new_zeros(len(clipped)))


def masked(ratio: Tensor, low: float, high: float) -> Weighed:
    """Weights: the ratio, or 0 where it is outside the bounds. The bounds themselves are inside."""
    outside = (ratio < low) | (ratio > high)
    return Weighed(weights=ratio.masked_fill(outside, 0), clipped=outside.new_zeros(len(outside)), masked=outside)


class TruncatedImportanceSampling(ImportanceWeights):
    """clip(exp(old - mu), low, cap): old under the trained weights, mu under the distribution that was sampled from.

    Without a cap this is decoupled PPO: exact, with unbounded variance.
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
        """The ratio, truncated on both sides."""
        return truncated(importance(tokens.log_ratio), self.low, self.cap)


class IcePop(ImportanceWeights):
    """exp(old - mu) if it lies in [low, high], else 0."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0, description="Ratios below weigh 0.")
    high: float = Field(default=2.0, gt=0, description="Ratios above weigh 0.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, which is {self.high}; use low: 0.5 and high: 2")
        return self

    def weigh(self, tokens: Sampled) -> Weighed:
        """The ratio, masked on both sides."""
        return masked(importance(tokens.log_ratio), self.low, self.high)


class MultiLevelImportanceSampling(ImportanceWeights):
    """exp(x), where x is old - mu of the token, its sum over the row (`sequence`), or its mean (`geometric`)."""

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="Whose ratio a token weighs: its own, its row's, or the row's geometric mean."
    )
    mode: Literal["truncate", "mask"] = Field(
        default="truncate", description="truncate: at most `high`; mask: 0 outside [1 / high, high]."
    )
    high: float = Field(default=2.0, ge=1, description="Bound on the ratio.")

    def weigh(self, tokens: Sampled) -> Weighed:
        """The ratio of the level, truncated or masked."""
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

__all__ = ["Correction", "CorrectionSettings", "IcePop", "MultiLevelImportanceSampling", "NoCorrection"]
__all__ += ["TruncatedImportanceSampling"]
