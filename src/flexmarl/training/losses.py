"""Decides the policy loss of each token, before aggregation (formulas in docs/math.md section 13).

In: log-probabilities and advantages of tokens. Out: the loss of each token, and where a bound acted.

`reinforce`   minus advantage times log-probability
`ppo`         the clipped loss (Schulman et al. 2017), with the wider upper bound of DAPO and the dual clip
`gspo`        Zheng et al. 2025: PPO's clip on the ratio of a whole row
`cispo`       MiniMax 2025: REINFORCE under a bounded weight, so that no token loses its gradient
`sapo`        Gao et al. 2025: a sigmoid in place of a clip, so that the gradient fades smoothly
`gmpo`        Zhao et al. 2025: the geometric mean of a row's clipped token ratios
`gpg`         Chu et al. 2025: the loss of REINFORCE; GPG's own factor alpha is in the advantage

A settings class is the loss, and this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexmarl.plugins import SettingsTable
from flexmarl.settings import Settings
from flexmarl.training.aggregation import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.batching import Rows


class PolicyLoss(Settings, ABC):
    """Base of all policy losses: the loss of single tokens, and how they are aggregated."""

    zero_advantage_is_zero_gradient: ClassVar[bool] = True
    """True if rows with advantage 0 need no forward pass; False if the advantage does not multiply all of the loss."""
    one_advantage_per_row: ClassVar[bool] = False
    """True if all tokens of a row must have the same advantage."""
    linear_in_advantage: ClassVar[bool] = False
    """True if, on-policy, a row's loss and gradient are A times those for A = 1: two sums then replace all advantages
    A = scale c + offset of a credit group (docs/math.md, Streaming credit)."""

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
        """Loss [N] of N sampled tokens; and [N] bool, True where a bound on the ratio acted.

        The first three arguments are [N], and only `logprobs` carries gradient. `rows` maps tokens to their rows.
        """


class RowLoss(PolicyLoss):
    """A loss that is defined as a mean over the tokens of a row, then over rows. Other aggregations are errors."""

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
    """rho = pi / pi_old. The log-ratio is clipped to [-20, 20] so that the ratio stays finite."""
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def clipped_surrogate(rho: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A rho, -A clip(rho, low, high)); and True where the second is larger, so that there is no gradient."""
    plain = -advantages * rho
    clipped = -advantages * rho.clamp(low, high)
    return plain.maximum(clipped), (clipped > plain).detach()


class ReinforceLoss(PolicyLoss):
    """-A lp: the plain policy gradient. It is exact on samples of the current version, and biased on older ones."""

    linear_in_advantage: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, in which no bound acts. `old_logprobs` and `rows` are not used."""
        return -advantages * logprobs, logprobs.detach() > 0


class Ppo(PolicyLoss):
    """PPO: max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); if A < 0, at most -A dual_clip.

    On samples of the current version rho is 1, and the gradient is that of -A lp whatever the bounds are. Sources:
    arXiv 1707.06347; 1912.09729 (dual clip).
    """

    linear_in_advantage: ClassVar[bool] = True

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
    """PPO's loss without dual clip, with the geometric mean of a row's ratios as ratio (GSPO, arXiv 2507.18071).

    This is the token form: each token has the row's ratio as its value and the gradient of its own log-probability. So
    tokens of a row may have different advantages. If they are equal, the gradient is that of the row's ratio itself.
    """

    linear_in_advantage: ClassVar[bool] = True

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0, le=1, description="The row ratio's lower bound is 1 - clip_low.")
    clip_high: float = Field(default=4e-4, ge=0, description="The row ratio's upper bound is 1 + clip_high.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens of rows whose ratio left the bounds in the profitable direction."""
        of_row = rows.spread(rows.mean(logprobs.detach() - old_logprobs))
        # Clipped at 10 so that the ratio stays finite. A row's mean is far below that unless something is wrong.
        rho = (of_row + logprobs - logprobs.detach()).clamp(max=10).exp()
        return clipped_surrogate(rho, advantages, 1 - self.clip_low, 1 + self.clip_high)


class Cispo(PolicyLoss):
    """-clip(rho, 1 - clip_low, 1 + clip_high) A lp; no gradient goes through the weight (CISPO, arXiv 2506.13585)."""

    linear_in_advantage: ClassVar[bool] = True

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
    """-A (4 / tau) sigmoid(tau (rho - 1)): the slope is -A at rho = 1 and smaller on both sides.

    It is not linear in A: tau differs for the two signs. Source: SAPO, arXiv 2511.20347.
    """

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, description="How fast the slope fades where A > 0.")
    tau_negative: float = Field(default=1.05, gt=0, description="How fast it fades where A <= 0.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, in which no bound acts. `rows` is not used."""
        positive = (advantages > 0).to(advantages.dtype)
        tau = self.tau_positive * positive + self.tau_negative * (1 - positive)
        gate = (tau * (ratio(logprobs, old_logprobs) - 1)).sigmoid()
        return -advantages * (4 / tau) * gate, logprobs.detach() > 0


class Gmpo(RowLoss):
    """-A exp(mean of d') per row: d' is a token's log-ratio, clipped to [-clip_low, clip_high] if that is profitable.

    Every token of a row gets the row's value, so the token mean equals it. Source: GMPO, arXiv 2507.20673.
    """

    one_advantage_per_row: ClassVar[bool] = True
    linear_in_advantage: ClassVar[bool] = True

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0, description="The log-ratio's lower bound is -clip_low.")
    clip_high: float = Field(default=0.4, ge=0, description="The log-ratio's upper bound.")

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the tokens whose log-ratio was clipped in the profitable direction."""
        log_ratio, sign = logprobs - old_logprobs, advantages.sign()
        plain, bounded = sign * log_ratio, sign * log_ratio.clamp(-self.clip_low, self.clip_high)
        # The mean has no lower bound if A > 0, and no upper one if A < 0: clipped at 20, so that its exp stays finite.
        mean = rows.mean(sign * plain.minimum(bounded)).clamp(-20, 20)
        return -advantages * rows.spread(mean.exp()), (bounded < plain).detach()


class GpgLoss(PolicyLoss):
    """-A lp, for use with credit.estimator type gpg, which computes GPG's advantages (arXiv 2504.02546)."""

    linear_in_advantage: ClassVar[bool] = True

    type: Literal["gpg"] = "gpg"

    def per_token(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """The loss, in which no bound acts. `old_logprobs` and `rows` are not used."""
        return -advantages * logprobs, logprobs.detach() > 0


LOSSES: SettingsTable[PolicyLoss] = SettingsTable(
    "loss",
    setting="policies.NAME.training.loss.type",
    group="losses",
    interface=[PolicyLoss],
    built_in={
        "ppo": "flexmarl.training.losses:Ppo",
        "reinforce": "flexmarl.training.losses:ReinforceLoss",
        "gpg": "flexmarl.training.losses:GpgLoss",
        "gspo": "flexmarl.training.losses:Gspo",
        "cispo": "flexmarl.training.losses:Cispo",
        "sapo": "flexmarl.training.losses:Sapo",
        "gmpo": "flexmarl.training.losses:Gmpo",
    },
)
"""Losses by `type`."""
loss = LOSSES.register
"""Decorator that makes a settings class the loss of its `type`: `@loss`."""

LossSettings = Annotated[PolicyLoss, LOSSES]
"""Settings field of any loss in the table, chosen by its `type`."""

__all__ = ["Cispo", "Gmpo", "GpgLoss", "Gspo", "LOSSES", "LossSettings", "PolicyLoss", "Ppo", "ReinforceLoss", "Sapo"]
__all__ += ["loss"]
