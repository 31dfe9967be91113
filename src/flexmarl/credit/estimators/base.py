"""Decides what an estimator is unless it says otherwise: settings that compare whole groups."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, Needs
from flexmarl.settings import Settings


class EstimatorBase(Settings, ABC):
    """The class of an estimator is its settings; it adds a `type`, a `key`, its options and `estimate`."""

    follows_calls: ClassVar[bool] = False
    """Whether it goes from call to call, as if there were one way through the episode: not for trees of turns."""
    adds_up_calls: ClassVar[bool] = False
    """Whether it adds up what the calls after a call earned: what else does so would count it twice."""
    has_fixed_baseline: ClassVar[bool] = False
    """Whether what a return is compared with is the same, whatever was sampled from the call on."""

    @property
    def grouping(self) -> GroupKey:
        """The key alone."""
        return getattr(self, "key")  # noqa: B009  # each kind has its own default, or a property

    @property
    def needs_branches(self) -> bool:
        """Whether it compares the candidates of a turn: for trees of turns alone."""
        return False

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether episodes of a task whose rewards are all equal teach it anything; if so, no filter drops the task."""
        return False

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
