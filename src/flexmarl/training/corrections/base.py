"""What every off-policy correction is: settings with a formula, free of torch until it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexmarl.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from flexmarl.training.token_rows import Rows


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
