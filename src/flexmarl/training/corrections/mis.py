"""Decides masked or truncated importance sampling on tokens, whole rows, or the geometric mean of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flexmarl.training.corrections.base import Sampled, Weighed
from flexmarl.training.corrections.importance import ImportanceWeights, importance, masked, truncated

if TYPE_CHECKING:
    from torch import Tensor


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
