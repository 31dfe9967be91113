"""What every policy loss is: settings with a formula, free of torch until it is called.

Decides the REINFORCE loss: minus advantage times log-probability.

Decides the clipped loss of PPO (Schulman et al. 2017), with the wider upper bound of DAPO and the dual clip.

Decides the loss of GSPO (Zheng et al. 2025): PPO's clip on the ratio of a whole row.

Decides the loss of CISPO (MiniMax 2025): REINFORCE under a bounded weight, so that no token loses its gradient.

Decides the loss of SAPO (Gao et al. 2025): a sigmoid in place of a clip, so that no gradient breaks off.

Decides the loss of GMPO (Zhao et al. 2025): the geometric mean of a row's clipped token ratios.

Decides the loss of GPG (Chu et al. 2025): that of REINFORCE; what is its own, alpha, is in the advantage.

Policy losses. In: log-probabilities and advantages of tokens. Out: the loss of each token, before aggregation.

A settings class is the loss. To add one, write its file and add its class to `LossSettings`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from flexmarl.settings import Settings
from flexmarl.training.aggregation import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.batching import Rows


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


class Reinforce(PolicyLoss):
    """-A lp: the plain policy gradient; exact on samples of the current version, biased on older ones."""

    type: Literal["reinforce"] = "reinforce"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, which nothing bounds; it looks at neither `old_logprobs` nor `rows`."""
        return -advantages * logprobs, logprobs.detach() > 0


class Ppo(PolicyLoss):
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0, at most -A dual_clip.

    On samples of the current version rho is 1 and the gradient is that of -A lp, whatever the bounds.
    """

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, ge=0, le=1, description="The ratio's lower bound is 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0, description="The ratio's upper bound is 1 + clip_high.")
    dual_clip: float | None = Field(
        default=3.0, gt=1, description="Bound on the ratio where the advantage is negative; null is off."
    )

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose ratio left the bounds in the profitable direction or passed the dual clip."""
        rho = ratio(logprobs, old_logprobs)
        loss, was_clipped = clipped_surrogate(rho, advantages, 1 - self.clip_low, 1 + self.clip_high)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            beyond = (advantages < 0) & (loss > bound)
            loss, was_clipped = bound.where(beyond, loss), was_clipped | beyond
        return loss, was_clipped


class Gspo(RowLoss):
    """PPO's clipped loss, its ratio the geometric mean of the row's token ratios, with no dual clip.

    The token form: every token has the row's ratio as its value, and its own log-probability's gradient, so that tokens
    of a row may have different advantages. Where they have one, it is the gradient of the row's ratio itself.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1, description="The row ratio's lower bound is 1 - clip_low.")
    clip_high: float = Field(default=4e-4, ge=0, description="The row ratio's upper bound is 1 + clip_high.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens of rows whose ratio left the bounds in the profitable direction."""
        of_row = rows.spread(rows.mean(logprobs.detach() - old_logprobs))
        # Cut at 10, so that the ratio stays finite: a row's mean is far from it unless something is wrong.
        rho = (of_row + logprobs - logprobs.detach()).clamp(max=10).exp()
        return clipped_surrogate(rho, advantages, 1 - self.clip_low, 1 + self.clip_high)


class Cispo(PolicyLoss):
    """-clip(rho, 1 - clip_low, 1 + clip_high) A lp, the weight without gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1, description="The weight's lower bound is 1 - clip_low; 1: none.")
    clip_high: float = Field(default=4.0, ge=0, description="The weight's upper bound is 1 + clip_high.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose weight is at a bound."""
        rho = ratio(logprobs.detach(), old_logprobs)
        weight = rho.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * advantages * logprobs, weight != rho


class Sapo(RowLoss):
    """-A (4 / tau) sigmoid(tau (rho - 1)): slope -A at rho = 1, less on both sides."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, description="How fast the slope fades where A > 0.")
    tau_negative: float = Field(default=1.05, gt=0, description="How fast it fades where A <= 0.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, in which no bound acts; it does not look at `rows`."""
        positive = (advantages > 0).to(advantages.dtype)
        tau = self.tau_positive * positive + self.tau_negative * (1 - positive)
        gate = (tau * (ratio(logprobs, old_logprobs) - 1)).sigmoid()
        return -advantages * (4 / tau) * gate, logprobs.detach() > 0


class Gmpo(RowLoss):
    """-A exp(mean of d') per row, d' the token's log-ratio, clipped to [-clip_low, clip_high] where that is profitable.

    A row's value stands at each of its tokens, so that their mean is it.
    """

    one_advantage_per_row: ClassVar[bool] = True

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0, description="The log-ratio's lower bound is -clip_low.")
    clip_high: float = Field(default=0.4, ge=0, description="The log-ratio's upper bound.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose log-ratio was clipped in the profitable direction."""
        log_ratio, sign = logprobs - old_logprobs, advantages.sign()
        plain, bounded = sign * log_ratio, sign * log_ratio.clamp(-self.clip_low, self.clip_high)
        # Not bounded from below where A > 0 nor above where A < 0: cut at 20, so that the mean's exp stays finite.
        mean = rows.mean(sign * plain.minimum(bounded)).clamp(-20, 20)
        return -advantages * rows.spread(mean.exp()), (bounded < plain).detach()


class Gpg(PolicyLoss):
    """-A lp, to go with credit.estimator type gpg, whose advantages it is named after."""

    type: Literal["gpg"] = "gpg"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, which nothing bounds; it looks at neither `old_logprobs` nor `rows`."""
        return -advantages * logprobs, logprobs.detach() > 0


LossSettings = Annotated[Ppo | Reinforce | Gpg | Gspo | Cispo | Sapo | Gmpo, Field(discriminator="type")]
LOSSES: dict[str, type[PolicyLoss]] = {
    loss.model_fields["type"].default: loss for loss in get_args(get_args(LossSettings)[0])
}

__all__ = [
    "Cispo",
    "Gmpo",
    "Gpg",
    "Gspo",
    "LOSSES",
    "LossSettings",
    "PolicyLoss",
    "Ppo",
    "Reinforce",
    "Sapo",
]
