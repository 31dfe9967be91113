"""What every policy loss is: settings with a formula, free of torch until it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from flexmarl.settings import Settings
from flexmarl.training.aggregation import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


class PolicyLoss(Settings, ABC):
    """Loss of single tokens, and how token losses become one number."""

    zero_advantage_is_zero_gradient: ClassVar[bool] = True
    """Rows with advantage 0 need no forward pass. False for a loss with a term that the advantage does not multiply."""
    one_advantage_per_row: ClassVar[bool] = False
    """Whether all tokens of a row must have the same advantage."""

    aggregation: Aggregation = Field(
        default="token-mean", description="How token losses are weighted and what their sum is divided by."
    )
    horizon_tokens: int | None = Field(
        default=None, gt=0, description="Constant divisor Hc of 'seq-mean-token-sum-norm'; unused otherwise."
    )

    @model_validator(mode="after")
    def _horizon_goes_with_its_mode(self) -> Self:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.horizon_tokens is not None):
            raise ValueError(
                f"horizon_tokens is {self.horizon_tokens} with aggregation '{self.aggregation}'; set it "
                "(to the longest response, for example) with 'seq-mean-token-sum-norm', and leave it out otherwise"
            )
        return self

    @abstractmethod
    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Loss [N] of N sampled tokens, and [N] bool: where a bound on the ratio acted.

        The first three are [N]; only `logprobs` carries gradient. `rows` says which tokens are one row's.
        """


class RowLoss(PolicyLoss):
    """A loss that is defined for a mean over the tokens of a row, then over rows; other aggregations are errors."""

    aggregation: Aggregation = Field(
        default="seq-mean-token-mean", description="Part of the loss's definition: seq-mean-token-mean."
    )

    @model_validator(mode="after")
    def _every_row_counts_the_same(self) -> Self:
        if self.aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"aggregation is '{self.aggregation}', but the loss '{getattr(self, 'type', '')}' is defined as a mean "
                "over rows of means over tokens; leave it out, or use type: ppo"
            )
        return self


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """rho = pi / pi_old; the log-ratio is clipped to 20 either way, so that the ratio stays finite."""
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def clipped_surrogate(rho: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A rho, -A clip(rho, low, high)), and where the second is the larger: there it has no gradient."""
    plain = -advantages * rho
    clipped = -advantages * rho.clamp(low, high)
    return plain.maximum(clipped), (clipped > plain).detach()
