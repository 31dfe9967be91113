"""What every off-policy correction is: settings with a formula, free of torch until it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """N sampled tokens, as they were and as they are. All are [N] and carry no gradient."""

    current: Tensor
    """Log-probability under the weights that are trained; a step has one update, so these are its old ones."""
    recorded: Tensor
    """Under the model of the version that sampled, as its engine recorded it: temperature 1, no filters."""
    drawn_from: Tensor
    """Under the distribution that was drawn from, temperature and filters applied."""
    fresh: Tensor
    """[N] bool: sampled at the version that is trained."""


class Correction(BaseModel, ABC):
    """What a token's loss is compared with, and what it is multiplied by. Divisors keep the original counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
