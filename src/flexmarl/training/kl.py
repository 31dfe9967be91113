"""Decides two terms of the objective: the divergence from the reference policy, and the critic's loss.

The divergence has a value for each token, and a coefficient that may adapt. The critic's loss is the distance of its
values from the returns that credit found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from flexmarl.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


Divergence = Literal["k1", "abs", "k2", "k3", "k3+"]


class ResetSettings(Settings):
    """When the reference becomes the present policy, and the optimiser begins anew (ProRL, arXiv 2505.24864)."""

    every: int | None = Field(default=None, ge=1, description="Steps after which it is reset; null: not by count.")
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Held-out evaluations in a row without improvement that reset it; null: not by evaluations.",
    )
    metric: str = Field(default="success", min_length=1, description="patience: the figure of the evaluations.")
    min_delta: float = Field(
        default=0.0, ge=0, description="patience: an evaluation improves if it is higher by more than this."
    )

    @model_validator(mode="after")
    def _something_resets(self) -> Self:
        if self.every is None and self.patience is None:
            raise ValueError("every and patience are null, so nothing resets the reference; set one, or reset: null")
        return self


class KlSettings(Settings):
    """Divergence that keeps the policy near its initial weights; d = lp - ref (docs/math.md section 13)."""

    type: Divergence = Field(
        default="k3+",
        description="k1: d; abs: |d|; k2: d^2 / 2; k3: exp(-d) + d - 1; k3+: the value of k3 with the gradient of k2. "
        "In the loss k3+ or k2, in the reward k1 have the gradient of KL(policy, reference).",
    )
    coef: float = Field(default=0.001, gt=0, description="Its weight beta; the first one, if it adapts.")
    where: Literal["loss", "reward"] = Field(
        default="loss", description="Added to the loss of each token, or taken from its reward before credit."
    )
    target: float | None = Field(
        default=None, gt=0, description="In the reward: the divergence that beta adapts to; null keeps beta."
    )
    horizon: int | None = Field(default=None, gt=0, description="Rows over which beta adapts; goes with target.")
    reset: ResetSettings | None = Field(
        default=None,
        description="Let the reference follow: at some moments it becomes the present policy, and the optimiser's "
        "state is emptied. null: the reference is the initial weights for the whole run.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.where == "loss" and self.type == "k1":
            raise ValueError(
                "type is 'k1' with where 'loss', where its expected gradient is 0: it would add noise and hold the "
                "policy to nothing; use type: k3+, or where: reward"
            )
        if (self.target is None) != (self.horizon is None):
            raise ValueError(f"target is {self.target} and horizon {self.horizon}; they go together, or leave both out")
        if self.where == "loss" and self.target is not None:
            raise ValueError(f"target is {self.target}, but only the coefficient of where: reward adapts; leave it out")
        return self

    def adapted(self, coef: float, kl: float, num_rows: int) -> float:
        """The coefficient after `num_rows` rows with the mean divergence `kl` (Ziegler et al. 2019).

        >>> KlSettings(where="reward", target=0.1, horizon=100).adapted(1.0, kl=0.3, num_rows=10)
        1.02
        """
        if self.target is None or self.horizon is None:
            return coef
        return coef * (1 + min(max(kl / self.target - 1, -0.2), 0.2) * num_rows / self.horizon)


def divergence(kind: Divergence, logprobs: Tensor, reference: Tensor) -> Tensor:
    """[N] the divergence of each token, from log-probabilities [N] under the policy and under the reference."""
    difference = logprobs - reference
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference)
        case "k3+":
            k2 = difference.square() / 2
            return k2 - k2.detach() + _k3(difference).detach()


def _k3(difference: Tensor) -> Tensor:
    """k3, clipped at 20 before the exponential and at 10 after it, so that one token cannot dominate a batch's loss."""
    log_ratio = (-difference).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


class CriticSettings(Settings):
    """A critic: a linear head on the policy's own trunk, trained with it, that gives each sampled token a value."""

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
