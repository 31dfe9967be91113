"""Decides truncated importance sampling: a token weighs as much likelier as it has become, up to a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from flexmarl.training.corrections.base import Correction, Sampled

if TYPE_CHECKING:
    from torch import Tensor


class TruncatedImportanceSampling(Correction):
    """min(exp(old - mu), cap): old under the weights that are trained, mu under what was drawn from.

    The loss is then compared with the trained weights themselves, so its own clipping does not act: this is PPO with
    its proximal policy decoupled from the one that sampled, and with a bound on the weight.
    """

    measures: ClassVar[tuple[str, ...]] = ("correction_weight", "correction_truncated")

    type: Literal["tis"] = "tis"
    cap: float = Field(default=2.0, gt=0, description="Largest weight: bounds the variance, at the price of a bias.")

    def old_logprobs(self, tokens: Sampled) -> Tensor:
        """The current ones."""
        return tokens.current

    def weights(self, tokens: Sampled) -> Tensor:
        """The truncated weights."""
        return _importance(tokens).clamp(max=self.cap)

    def measured(self, tokens: Sampled) -> tuple[Tensor, ...]:
        """The weight, and whether it was truncated."""
        importance = _importance(tokens)
        return importance.clamp(max=self.cap), (importance > self.cap).to(importance.dtype)


def _importance(tokens: Sampled) -> Tensor:
    return (tokens.current - tokens.drawn_from).clamp(-20, 20).exp()
