"""Decides what an estimator is unless it says otherwise: settings that compare whole groups."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from flexmarl.credit.interface import Credit, CreditRow, Extra, Needs
from flexmarl.settings import Settings


class EstimatorBase(Settings, ABC):
    """The class of an estimator is its settings; it adds a `type`, a `key`, its options and `estimate`."""

    follows_calls: ClassVar[bool] = False
    """Whether it goes from call to call, as if there were one way through the episode: not for trees of turns."""
    needs_branches: ClassVar[bool] = False
    """Whether it compares the candidates of a turn: for trees of turns alone."""

    @property
    def needs(self) -> Needs:
        """Whole groups."""
        return "group"

    @property
    def uses(self) -> frozenset[Extra]:
        """Nothing but rewards."""
        return frozenset()

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with the rewards that it compares, which filters look at: those that they have."""
        return rows

    @abstractmethod
    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """See `Estimator`."""
